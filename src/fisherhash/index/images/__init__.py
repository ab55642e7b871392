"""Images in an index: folders kept in sync, searches by image, likely duplicates."""
