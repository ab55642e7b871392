"""``python -m fisherhash`` is the command ``fisherhash``."""

if __name__ == "__main__":
    from fisherhash.cli import main

    main()
