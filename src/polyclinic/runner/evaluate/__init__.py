"""Scores of single cases, their statistics and calibration; models of others on the images of a study."""
