"""A study: what a user writes down. Validated as a whole, with errors that name the field and the cure.

study = load_study(Path("study.toml"), ["method.rounds=5"])
study = Study(data={"source": "fundus-phantom"}, sites={"partition": "iid", "count": 4}, method={"name": "cwt"})
"""

from polyclinic.study.reading import load_run_study, load_study
from polyclinic.study.tables import Study, parse_study

__all__ = ["Study", "load_run_study", "load_study", "parse_study"]
