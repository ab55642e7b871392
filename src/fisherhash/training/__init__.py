"""From labelled images, or vectors, to a saved and measured hasher.

The door is :func:`fisherhash.training.fitting.fit`, in six steps: open (``jobs``), features and
train (``steps``, with the one loop in ``loop``), finish (``finishing``: the cut and the class
step), measure (``measuring``), save (``trained``). ``settings`` has every option, ``recipes`` what
DFH is trained with by default.
"""
