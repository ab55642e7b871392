"""Static HTML pages, and the demo that writes one."""
