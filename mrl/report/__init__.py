"""`mrl report`: what runs did, read from their directories: a page, pictures, a table on the terminal."""
