"""What is measured of the requests that pass, and how it leaves the process."""
