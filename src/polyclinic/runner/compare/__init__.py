"""Several runs of one study: comparison, search for settings, worth of sites, forgetting, speed of this machine."""
