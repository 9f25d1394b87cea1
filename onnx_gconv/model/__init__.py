"""Reading, counting and editing ONNX models."""
