"""Which Convs in bodies of If, Loop and Scan nodes a job may group: what is known of them is their weights alone."""

from dataclasses import replace

from onnx_gconv.model.network import Layer, Network, Skipped
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.settings import GathersName


def offered(job: Job, gathers: GathersName) -> Network:
    """Return the network with the layers in bodies among all layers, or among the skipped Convs with the reason."""
    network = job.original.network
    if not network.inside:
        return network
    reasons = {layer.name: _why_not(job, gathers, layer) for layer in network.inside}
    layers = (*network.layers, *(layer for layer in network.inside if not reasons[layer.name]))
    skipped = [Skipped(layer.name, layer.label, reasons[layer.name]) for layer in network.inside if reasons[layer.name]]
    return replace(network, layers=layers, skipped=(*network.skipped, *skipped), inside=())


def _why_not(job: Job, gathers: GathersName, layer: Layer) -> str:
    settings = job.settings
    reasons = {
        f"its channels need Gathers, which --gathers {gathers} does not leave free": gathers != "free",
        "its costs are not measured on samples": settings.calib is not None,
        f"--criterion {settings.criterion} sees no tensors there": settings.criterion not in ("l1", "l2"),
        "it is not trained": settings.refine_steps is not None,
        "it is not timed": job.facts.times is not None or settings.max_latency is not None,
        "its MACs are not known": layer.macs is None and not {"max_macs", "max_flops"}.isdisjoint(settings.limits),
    }
    return next((f"it is inside an If, Loop or Scan: {reason}" for reason, is_so in reasons.items() if is_so), "")
