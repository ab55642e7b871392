"""``python -m fisherhash`` is the command ``fisherhash``."""

from fisherhash.cli import main

if __name__ == "__main__":
    main()
