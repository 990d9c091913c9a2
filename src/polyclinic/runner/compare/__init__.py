"""Several runs of one study: comparison, search for settings, forgetting, speed of this machine."""
