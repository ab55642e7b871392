"""Images in an index: folders kept in sync, searches by image, likely duplicates.

The door is :class:`fisherhash.index.images.image_index.ImageIndex`; ``creating`` makes an index
that does not exist yet, with the hasher of ``choosing``. A sync goes from ``syncing`` through
``encoding``, a search through ``searching``, duplicates through ``duplicate_search``. ``options``
and ``results`` are what goes in and what comes out, on the command line, in the API and in Python.
"""
