"""`mrl plan`: memory of every rank, communication, bubble and time of a run before it is started."""
