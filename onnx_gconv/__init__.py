"""Turn the convolutions of a trained ONNX model into group convolutions."""

__version__ = "0.1.0"
