"""Studies that are audited in seconds."""

MASKS = {
    "data.source": "brain-phantom", "data.samples": 60, "task.name": "segmentation", "model.backbone": "unet",
}  # fmt: skip
#: methods whose audits are drawn, which takes longer than some attacks: with them every kind of picture is looked at
DRAWN = ("fedavg", "splitnn", "fedreplay", "cwt-replay")
SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}
