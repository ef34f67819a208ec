"""One command per question; each prints the machine, the figure and what it is to be held against."""
