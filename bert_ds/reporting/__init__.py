"""What runs logged, joined and shown: as a page, a picture and a table."""
