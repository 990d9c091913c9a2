"""The flags of FedER's benchmark."""

from __future__ import annotations

import argparse
import os
import time

from feder_data import SITES
from feder_plan import RATES

SITE_COUNTS = [2, 4, 8, 16]


def read_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps on phantoms: does it run?")
    parser.add_argument("--json", help="write the figures into this file")
    parser.add_argument("--data", default=os.environ.get("POLYCLINIC_DATA"), help="folder of the real images")
    parser.add_argument("--task", choices=("skin", "chest"), default="skin")
    parser.add_argument("--source", default="vidir_modern", help="whose images Fig. 2 spreads over equal sites")
    parser.add_argument("--rows", type=lambda text: text.split(";"), help="only these rows, separated by ;")
    parser.add_argument("--scalability", action="store_true", help="Fig. 2 instead of the tables")
    parser.add_argument("--plot", help="draw Fig. 2 into this file")
    parser.add_argument(
        "--other-backbone", default="resnet34", help="of the first site in the row 'feder, two networks'"
    )
    parser.add_argument("--site-counts", type=int, nargs="+", default=SITE_COUNTS, help="numbers of sites of Fig. 2")
    parser.add_argument("--out", help="folder of the runs, to go on later; by default they are thrown away")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--local-steps", type=int, default=0, help="steps of a site in a round; 0: one pass")
    parser.add_argument("--decay-every", type=int, default=0, help="rounds after which learning rates fall to a tenth")
    parser.add_argument("--select", choices=("best", "last"), default="best", help="the round whose models count")
    parser.add_argument("--evaluate-every", type=int, default=1, help="rounds between two looks at validation images")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--backbone", default="small-cnn")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--generator-steps", type=int, default=1000, help="at most, in the first phase")
    parser.add_argument("--generator", choices=("dcgan", "stylegan2"), default="dcgan")
    parser.add_argument("--generator-set", default="{}", help="settings of the generator, as JSON")
    parser.add_argument(
        "--tuning-steps", type=int, default=100, help="at most, in the second phase; 0: plain training, no phases"
    )
    parser.add_argument("--most", type=int, default=700, help="images of a class that a site has at most")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates that are tried")
    parser.add_argument("--check-every", type=int, default=100, help="steps between two measurements of it")
    parser.add_argument("--measured", type=int, default=128, help="images for it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument(
        "--generators-at-once", type=int, default=0, help="only train the generators of all seeds, so many at a time"
    )
    parser.add_argument("--trained", action="store_true", help="generators lie in the cache: nothing is trained ahead")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long, and report what is finished")
    options = parser.parse_args(arguments)
    options.started = time.monotonic()
    options.sites = len(SITES[options.task]) if options.data else 3
    if options.quick:
        options.seeds, options.rounds, options.data = 1, 2, None
        options.size, options.backbone, options.other_backbone = 28, "lenet5", "small-cnn"
        if options.scalability:  # FedBN needs batch norm
            options.backbone = "small-cnn"
    return options
