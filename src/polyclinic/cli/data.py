"""`polyclinic data`."""

import typer

app = typer.Typer()
