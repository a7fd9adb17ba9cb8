"""Names of operators that exist elsewhere, for the error about an operator that this server does not have."""

from __future__ import annotations

ONNX = frozenset(
    """
    Abs Acos Acosh Adagrad Adam Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast
    CastLike CausalConvWithState Ceil Celu CenterCropPad Clip Col2Im Compress Concat ConcatFromSequence Constant
    ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv DepthToSpace
    DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU
    Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Gradient Greater
    GreaterOrEqual GridSample GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If
    ImageDecoder InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual
    LinearAttention Log LogSoftmax Loop LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxRoiPool MaxUnpool
    Mean MeanVarianceNormalization MelWeightMatrix Min Mish Mod Momentum Mul Multinomial Neg
    NegativeLogLikelihoodLoss NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement OptionalHasElement Or
    PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN RandomNormal RandomNormalLike
    RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare RegexFullMatch Relu Reshape Resize ReverseSequence
    RoiAlign RotaryEmbedding Round STFT Scan Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct
    SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap Shape Shrink Sigmoid Sign Sin Sinh Size
    Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze
    StringConcat StringNormalizer StringSplit Sub Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer
    ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
    """.split()
)
"""The operators of ONNX: ai.onnx and ai.onnx.preview.training, as onnx 1.23 has them."""

_WHY = {
    "has no kernel for a CPU in ONNX Runtime": """
        BatchScale BiasDropout BiasSoftmax BiasSoftmaxDropout BitmaskBiasDropout BitmaskDropout BitmaskDropoutGrad
        FlattenAndUnpad GistPack1Decoder GistPack1Encoder GistPack8Decoder GistPack8Encoder GistPack16Decoder
        GistPack16Encoder GistPackMsfp15Decoder GistPackMsfp15Encoder All IsAllFinite IsFinite LambOptimizer
        MixedPrecisionScale ScaledSum SoftmaxDropoutGrad TorchEmbedding View
    """,
    "ends the process of ONNX Runtime": "GistBinarizeDecoder GistBinarizeEncoder",
    "moves tensors between processes or GPUs, as buffers do here": """
        AdasumAllReduce MegatronF MegatronG NcclAllGather NcclAllReduce NcclReduceScatter Recv Send
    """,
    "orders the steps of a graph, and computes nothing": "Group PassThrough RecordEvent WaitEvent YieldOp",
    "runs code that the model brings": "PythonOp PythonOpGrad TritonOp",
    "writes texts for TensorBoard": "SummaryHistogram SummaryMerge SummaryScalar SummaryText",
}

NOT_SERVED = {name: why for why, names in _WHY.items() for name in names.split()}
"""The training operators of ONNX Runtime 1.19 that this server does not have, each with the reason."""
