"""Audits: a run's kept parcels, each attacked with what fits its kind, scored where the images are, put into words.

This room knows studies, assemblies, parcels and attacks, and where a deployed site has its images; methods, sites and
engines know nothing of it.
"""

from polyclinic.study.audit_settings import Audit

__all__ = ["Audit"]
