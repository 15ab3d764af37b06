/*
Cards that runs are planned for: CARD(name, dense BF16 and FP8 TFLOP/s, GB of memory, TB/s, whether
it multiplies MXFP8 as it is, and the fractions that a step's GEMMs reach of the BF16 peak, native
ones of the FP8 peak, those by blocks of 128 of that, attention of BF16's, and memory-bound
operations of the bandwidth).

Data sheets: NVIDIA H100 Tensor Core GPU (SXM), NVIDIA H200 Tensor Core GPU (SXM), NVIDIA DGX B200
(an eighth of it), NVIDIA GB200 NVL72 (a 72nd of it). They give FP8 and BF16 with sparsity: half of
that is dense. The fractions of an H100 were measured just before commit c490b45, of an H200 at
7684389 but for its native GEMMs'; these and those of the others are derived in doc/planning.md,
until dev/gpu/check.sh has measured them: its report comes with this file as the card has it.
*/
CARD("h100", 989.4, 1978.9, 80, 3.35, false, 0.70, 0.61, 0.42, 0.22, 0.82)
CARD("h200", 989.4, 1978.9, 141, 4.8, false, 0.73, 0.62, 0.48, 0.24, 0.77)
CARD("b200", 2250, 4500, 180, 8, true, 0.70, 0.70, 0.70, 0.45, 0.75)
CARD("gb200", 2500, 5000, 186, 8, true, 0.70, 0.70, 0.70, 0.45, 0.75)
