"""The search page: an HTTP server over an index of images, and a client of its JSON API."""
