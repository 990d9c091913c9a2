"""Polyclinic: hospitals train medical-imaging models together without sharing their images."""

__version__ = "0.1.0"
