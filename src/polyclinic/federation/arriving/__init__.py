"""What arrives: checks of what somebody else sent, before any work is done with it. `orders.py` is the site's side."""
