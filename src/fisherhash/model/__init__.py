"""A model: backbone and head, from images to codes; saved, loaded, built in."""
