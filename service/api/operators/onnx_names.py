"""Names of operators that exist elsewhere, for the error about an operator that this server does not have."""

from __future__ import annotations

IN_GRAPHS = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitCast BitShift
    BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Concat ConstantOfShape Conv ConvTranspose
    Cos Cosh CumProd CumSum DepthToSpace Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization
    LeakyRelu Less LessOrEqual Log LogSoftmax LpPool MatMul Max MaxPool Mean Min Mish Mod Mul Neg
    NegativeLogLikelihoodLoss NonZero Not OneHot Or PRelu Pad Pow RMSNormalization RNN RandomNormal RandomNormalLike
    RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize RotaryEmbedding Round ScatterElements ScatterND
    Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth
    Split Sqrt Squeeze Sub Sum Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where
    Xor
    """.split()
)
"""The operators of ONNX that run in graphs. The package of graphs has them, too, but takes most of a second to load."""

ONNX = IN_GRAPHS | frozenset(
    """
    Adagrad Adam AffineGrid Bernoulli BlackmanWindow CausalConvWithState CenterCropPad Col2Im Compress
    ConcatFromSequence Constant ConvInteger DFT DeformConv DequantizeLinear Det DynamicQuantizeLinear Gradient
    HammingWindow HannWindow Hardmax If ImageDecoder LinearAttention Loop LpNormalization MatMulInteger MaxRoiPool
    MaxUnpool MeanVarianceNormalization MelWeightMatrix Momentum Multinomial NonMaxSuppression Optional
    OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul QuantizeLinear RegexFullMatch ReverseSequence
    RoiAlign STFT Scan Scatter SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    SequenceMap SplitToSequence StringConcat StringNormalizer StringSplit SwiGLU TfIdfVectorizer Unique Upsample
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
