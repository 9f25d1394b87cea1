"""The ops that handle each channel by itself."""

# One output, one input with channels, the same shape or other pixels: what happens to a channel depends on it alone.
UNARY = frozenset(
    {
        "Abs", "Acos", "Asin", "Atan", "AveragePool", "Cast", "Ceil", "Celu", "Clip", "Cos", "Dropout", "Elu", "Erf",
        "Exp", "Floor", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "HardSigmoid", "HardSwish",
        "Identity", "LeakyRelu", "Log", "LpPool", "MaxPool", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round",
        "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
ELEMENTWISE = frozenset(
    {
        "Add", "And", "BitShift", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean",
        "Min", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
    }
)  # fmt: skip
# Constants of one number per channel, by input slot.
PER_CHANNEL = {"BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2)}
REDUCING = frozenset(
    {
        "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
        "ReduceSum",
    }
)  # fmt: skip
