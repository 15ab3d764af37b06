/*
A linear layer under every named recipe and many adjusted ones: Y, dX, dW and db against
double-precision products of operands that are quantized and decoded here, from the formats',
roundings' and scalings' definitions, without llmc/numerics/mx.h, scaling.h or encoding.h. Bound:
accumulation in FP32, (length + 2) 2^-24 times the sum of magnitudes, and one rounding of the
result.
*/
#include "check.h"
#include "by_name.h"
#include "rounding_reference.h"
#include "llmc/base/random.h"
#include "llmc/model/linear.h"

#include <float.h>

static const Backend *backend;

// The formats by definition
// ------------------------------------------------------------------------------------------

typedef struct {
    int mantissa_bits, bias, max_code;
} Definition;

static const Definition DEFINITIONS[] = {[FORMAT_E4M3] = {3, 7, 0x7E},
                                         [FORMAT_E5M2] = {2, 15, 0x7B},
                                         [FORMAT_E2M3] = {3, 1, 0x1F},
                                         [FORMAT_E3M2] = {2, 3, 0x1F},
                                         [FORMAT_E2M1] = {1, 1, 0x07}};

// The values of the codes without sign, ascending.
static double values_of[NUM_FORMATS][128];

static void fill_values(Format format) {
    Definition d = DEFINITIONS[format];
    for (int code = 0; code <= d.max_code; code++) {
        int exponent = code >> d.mantissa_bits, mantissa = code & ((1 << d.mantissa_bits) - 1);
        double fraction = ldexp(mantissa, -d.mantissa_bits);
        values_of[format][code] = exponent == 0 ? ldexp(fraction, 1 - d.bias) : ldexp(1 + fraction, exponent - d.bias);
    }
}

// The format's value nearest to x; of two, that with the even code; beyond the largest, the
// largest.
static double nearest_value(Format format, double x) {
    const double *values = values_of[format];
    double magnitude = fabs(x);
    int low = 0, high = DEFINITIONS[format].max_code;
    while (low < high) { // the largest code whose value is at most |x|
        int middle = (low + high + 1) / 2;
        if (values[middle] <= magnitude) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    double below = values[low];
    if (low == DEFINITIONS[format].max_code) return copysign(below, x);
    double above = values[low + 1];
    bool up = magnitude - below > above - magnitude || (magnitude - below == above - magnitude && low % 2 == 1);
    return copysign(up ? above : below, x);
}

// Where the tests' stochastic roundings draw, X's and dY's in the second place.
enum { SEED = 7, UPDATES = 5, STEP = 3, FIRST_ROW = 1000 };

// An operand whose values become elements: (rows, cols) from `first` on.
typedef struct {
    const double *first;
    int64_t cols;
    Format format;
    const Recipe *recipe;
    GemmOperand operand;
} Elements;

// Returns what a value of the operand, multiplied already, becomes as an element.
static double element_value(const Elements *e, const double *value, float scaled) {
    Role role = operand_role(e->operand);
    if (e->recipe->element_rounding[role] == ROUND_NEAREST) return nearest_value(e->format, (double)scaled);
    bool is_weight = role == ROLE_WEIGHTS;
    bool is_shared = is_weight && e->recipe->square_weights && e->recipe->format[FPROP_W] >= FORMAT_E4M3;
    int64_t row = (value - e->first) / e->cols + (is_weight ? 0 : FIRST_ROW), col = (value - e->first) % e->cols;
    uint32_t random = reference_random(SEED, is_weight ? UPDATES : STEP, is_shared ? FPROP_W : e->operand,
                                       (uint32_t)row, (uint32_t)col);
    return reference_stochastic(values_of[e->format], DEFINITIONS[e->format].max_code + 1, (double)scaled, random);
}

static double prescale_of(const Elements *e) { return e->recipe->prescale != 0 ? (double)e->recipe->prescale : 1; }

// amax = 2^A m_a, the format's largest = 2^E m_e, 1 <= m < 2: the scale is 2^(A - E), one more
// where the rounding says.
static double block_scale(Format format, ScaleRounding rounding, double amax) {
    if (amax == 0) return ldexp(1, -127);
    double max = values_of[format][DEFINITIONS[format].max_code];
    int exponent = ilogb(amax), max_exponent = ilogb(max);
    double mantissa = ldexp(amax, -exponent), max_mantissa = ldexp(max, -max_exponent);
    int step_bits = DEFINITIONS[format].mantissa_bits;
    int up = rounding == SCALE_RCEIL  ? mantissa > max_mantissa
             : rounding == SCALE_CEIL ? mantissa > 1
             : rounding == SCALE_EVEN ? floor(ldexp(mantissa, step_bits) + 0.5) >= ldexp(2, step_bits)
                                      : 0;
    int scale = exponent - max_exponent + up;
    return ldexp(1, scale < -127 ? -127 : scale > 127 ? 127 : scale);
}

// rows x cols values, rows `stride` apart, become what their MX block decodes to.
static void quantize_block(double *x, int64_t rows, int64_t cols, int64_t stride, const Elements *e,
                           ScaleRounding rounding) {
    double amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        amax = fmax(amax, fabs(x[i / cols * stride + i % cols]));
    }
    double scale = block_scale(e->format, rounding, amax), prescale = prescale_of(e);
    for (int64_t i = 0; i < rows * cols; i++) {
        double *value = &x[i / cols * stride + i % cols];
        *value = element_value(e, value, (float)(*value * (prescale / scale))) * scale / prescale;
    }
}

static int64_t block_length(int64_t first, int64_t length) { return length - first < 32 ? length - first : 32; }

// To BF16's 8 significant bits; the tests' values are far from its ends.
static double nearest_bf16(double x) {
    if (x == 0) return x;
    int unit = ilogb(x) - 7;
    return ldexp(rint(ldexp(x, -unit)), unit);
}

static bool is_square(const Recipe *recipe, GemmOperand operand) {
    return recipe->square_weights && operand_role(operand) == ROLE_WEIGHTS;
}

// What a scaling that isn't MX multiplies a block by, with what it is then divided by: `stored` is
// a block's own scale, and s its tensor's.
typedef struct {
    float multiplier;
    double stored;
} Scale;

static float not_infinite(float x) { return isinf(x) ? FLT_MAX : x; }

static Scale nvfp4_scale(float scale, float s) {
    double code = nearest_value(FORMAT_E4M3, (double)scale);
    return (Scale){not_infinite(1 / ((float)code * (1 / s))), code};
}

// Returns the value of E2M1 nearest to x in a block, but for the tensor's scale.
static double nvfp4_value(Scale scale, double x) {
    return nearest_value(FORMAT_E2M1, (double)((float)x * scale.multiplier)) * scale.stored;
}

// The sum of |decoded - x| of four over six, in FP32; of a square by rows, then by rows half, a
// quarter, ... of 16 apart.
static float errors_of(const double *x, int64_t rows, int64_t cols, int64_t stride, bool square, Scale scale,
                       float tensor_amax) {
    float sums[16] = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        double value = x[i / cols * stride + i % cols];
        float decoded = (float)nvfp4_value(scale, value) * tensor_amax / (6 * 256);
        sums[square ? i / cols : 0] += fabsf(decoded - (float)value);
    }
    for (int apart = 8; apart > 0; apart /= 2) {
        for (int r = 0; r < apart; r++) {
            sums[r] += sums[r + apart];
        }
    }
    return sums[0];
}

static float largest_of(const double *x, int64_t rows, int64_t cols, int64_t stride) {
    double amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        amax = fmax(amax, fabs(x[i / cols * stride + i % cols]));
    }
    return (float)amax;
}

static Scale scale_of(const double *x, int64_t rows, int64_t cols, int64_t stride, bool square, Format format,
                      Scaling scaling, float tensor_amax, float s) {
    float amax = largest_of(x, rows, cols, stride);
    float max = (float)values_of[format][DEFINITIONS[format].max_code];
    if (scaling == SCALING_TENSOR) return (Scale){s, 1};
    if (scaling == SCALING_BLOCK128) {
        float scale = amax > 0 ? ldexpf(1, ilogbf(not_infinite(max / amax))) : 1;
        return (Scale){scale, 1 / (double)scale};
    }
    if (scaling == SCALING_BLOCK128_FP32) {
        float scale = amax > 0 ? not_infinite(max / amax) : 1;
        return (Scale){scale, (double)(1 / scale)};
    }
    if (scaling == SCALING_NVFP4) return nvfp4_scale(amax * (s * (1.0f / 6)), s);
    Scale to_six = nvfp4_scale(amax / 6 * s, s), to_four = nvfp4_scale(amax / 6 * s * 1.5f, s);
    bool better = errors_of(x, rows, cols, stride, square, to_four, tensor_amax) <
                  errors_of(x, rows, cols, stride, square, to_six, tensor_amax);
    return better ? to_four : to_six;
}

// Makes of (rows, cols) values what they decode to in a scaling that isn't MX, in blocks of
// `height` x `width`.
static void scale_values(double *x, int64_t rows, int64_t cols, int64_t height, int64_t width, const Elements *e,
                         Scaling scaling) {
    bool square = height == width;
    Format format = e->format;
    float prescale = (float)prescale_of(e);
    float amax = largest_of(x, rows, cols, cols), max = (float)values_of[format][DEFINITIONS[format].max_code];
    float stretched = scaling == SCALING_NVFP4 ? 6 * 448 : scaling == SCALING_NVFP4_46 ? 6 * 256 : max;
    bool has_factor = scaling != SCALING_BLOCK128 && scaling != SCALING_BLOCK128_FP32;
    float s = !has_factor ? 1 : amax > 0 || scaling != SCALING_TENSOR ? not_infinite(stretched / amax) : 1;
    for (int64_t r = 0; r < rows; r += height) {
        for (int64_t c = 0; c < cols; c += width) {
            int64_t high = min_int64(height, rows - r), wide = min_int64(width, cols - c);
            double *block = x + r * cols + c;
            Scale scale = scale_of(block, high, wide, cols, square, format, scaling, amax, s);
            for (int64_t i = 0; i < high * wide; i++) {
                double *value = &block[i / wide * cols + i % wide];
                double element = element_value(e, value, (float)*value * (scale.multiplier * prescale));
                *value = element * scale.stored * (double)(1 / s) / (double)prescale;
            }
        }
    }
}

// Signs of the layer under test, by GEMM and element of a group.
static float sigma[3][128];

// Transforms by Sylvester's recursion, H_2n of a over b being H_n a + H_n b over H_n a - H_n b, in
// FP32.
static void sylvester(float *x, int64_t length) {
    int64_t half = length / 2;
    if (length == 1) return;
    sylvester(x, half);
    sylvester(x + half, half);
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a + b;
        x[half + i] = a - b;
    }
}

// Transforms `count` values, `step` apart, in groups of `size` and what powers of two are left; of
// BF16 they are rounded to that.
static void transform_line(double *x, int64_t count, int64_t step, int64_t size, const float *signs, Format dtype) {
    for (int64_t first = 0; first < count;) {
        float group[128];
        while (size > count - first)
            size /= 2;
        for (int64_t i = 0; i < size; i++)
            group[i] = signs[i] * (float)x[(first + i) * step];
        sylvester(group, size);
        for (int64_t i = 0; i < size; i++) {
            float value = group[i] * (float)(1 / sqrt((double)size));
            x[(first + i) * step] = dtype == FORMAT_BF16 ? nearest_bf16((double)value) : (double)value;
        }
        first += size;
    }
}

static double *operand_values(const double *source, int64_t rows, int64_t cols, const Recipe *recipe,
                              GemmOperand operand);

// What an operand is quantized from: of `source`, or of what the forward pass multiplied, the
// values or their transform.
static double *operand_source(const double *source, int64_t rows, int64_t cols, const Recipe *recipe,
                              GemmOperand operand) {
    bool is_weight = operand_role(operand) == ROLE_WEIGHTS, rowwise = operand < WGRAD_DY && operand != DGRAD_W;
    double *x = memcpy(take_doubles(rows * cols), source, (size_t)(rows * cols) * sizeof(double));
    Format dtype = is_weight ? FORMAT_FP32 : recipe->activation_dtype;
    if (is_weight && recipe->format[operand] == FORMAT_BF16) dtype = FORMAT_BF16;
    if (recipe_is_from_forward(recipe, operand) && !(is_weight && recipe->square_weights)) {
        x = operand_values(source, rows, cols, recipe, is_weight ? FPROP_W : FPROP_X);
        dtype = FORMAT_BF16;
    }
    for (int64_t i = 0; i < rows * cols && dtype == FORMAT_BF16; i++) {
        x[i] = nearest_bf16((double)(float)x[i]); // a product with a tensor's factor is one of FP32
    }
    int gemm = operand / 2;
    for (int64_t line = 0; recipe->transform[gemm] && line < (rowwise ? rows : cols); line++) {
        transform_line(rowwise ? x + line * cols : x + line, rowwise ? cols : rows, rowwise ? 1 : cols,
                       recipe->hadamard_size, sigma[gemm], dtype);
    }
    return x;
}

// What an operand of a GEMM stands for: (rows, cols) `source` in the operand's format.
static double *operand_values(const double *source, int64_t rows, int64_t cols, const Recipe *recipe,
                              GemmOperand operand) {
    Format format = recipe->format[operand];
    double *x = operand_source(source, rows, cols, recipe, operand);
    if (format == FORMAT_FP32) return x;
    if (format == FORMAT_BF16) {
        for (int64_t i = 0; i < rows * cols; i++) {
            x[i] = nearest_bf16(x[i]);
        }
        return x;
    }
    ScaleRounding rounding = recipe->rounding[operand_role(operand)];
    const Elements elements = {x, cols, format, recipe, operand};
    bool square = is_square(recipe, operand);
    bool rowwise = operand == FPROP_X || operand == FPROP_W || operand == DGRAD_DY; // the axis that is summed over
    Scaling scaling = recipe->scaling[operand];
    if (scaling != SCALING_MX) {
        int64_t length = scaling == SCALING_NVFP4 || scaling == SCALING_NVFP4_46 ? 16 : 128;
        scale_values(x, rows, cols, rowwise && !square ? 1 : length, rowwise || square ? length : 1, &elements,
                     scaling);
        return x;
    }
    for (int64_t r = 0; r < rows; r += rowwise && !square ? 1 : 32) {
        for (int64_t c = 0; c < cols; c += rowwise || square ? 32 : 1) {
            int64_t height = rowwise && !square ? 1 : block_length(r, rows);
            int64_t width = rowwise || square ? block_length(c, cols) : 1;
            quantize_block(x + r * cols + c, height, width, cols, &elements, rounding);
        }
    }
    return x;
}

// A layer under test
// -------------------------------------------------------------------------------------------------

typedef struct {
    int64_t rows, K, N;
    Recipe recipe;
    Format y_dtype, dy_dtype;
    bool has_bias, input_is_remade;
    ParamList params;
    Linear linear;
    MemoryPlan plan;
    QuantStats stats[NUM_GEMM_OPERANDS];
    float *dweight_before, *dbias_before;
    size_t scratch_bytes;
} Layer;

// Both passes of the layout: one that counts, one that places.
static void lay_out(Layer *l, bool training) {
    LinearScratch scratch = {0};
    for (int pass = 0; pass < 2; pass++) {
        MemoryPlan plan = {.base = pass ? pool_take(l->plan.used) : NULL};
        param_list_layout(&l->params, &plan, backend, training);
        linear_layout(&l->linear, &plan, backend, l->rows, training, &scratch);
        assert_true(pass == 0 || plan.used == l->plan.used);
        l->plan = plan;
    }
    l->scratch_bytes = scratch.bytes;
    l->linear.scratch = pool_take(scratch.bytes);
    backend->use_workspace(pool_take(scratch.workspace), scratch.workspace);
}

// Reads the signs of the layer's transforms: Transformer Engine's by their list, others from the
// layer.
static void read_signs(const Layer *l) {
    static const char FIXED[] = "+++-+------+-+--";
    for (int gemm = 0; gemm < 3; gemm++) {
        const uint32_t *minus = l->params.params[0].hadamard[gemm].minus;
        for (int i = 0; i < 128; i++) {
            bool is_minus =
                l->recipe.transform[gemm] == TRANSFORM_FIXED ? FIXED[i % 16] == '-' : minus[i / 32] >> (i % 32) & 1;
            sigma[gemm][i] = is_minus ? -1 : 1;
        }
    }
}

static void make_layer(Layer *l, bool training) {
    l->params.sharding = sharding_single();
    Param weight = {.name = "weight", .rows = l->N, .cols = l->K};
    linear_declare_weight(&weight, &l->recipe);
    param_list_reserve(&l->params, 2);
    param_list_add(&l->params, weight);
    param_list_add(&l->params, (Param){.name = "bias", .rows = 1, .cols = l->N, .is_vector = true});
    l->linear = (Linear){.recipe = l->recipe,
                         .weight = &l->params.params[0],
                         .bias = l->has_bias ? &l->params.params[1] : NULL,
                         .input_is_remade = l->input_is_remade,
                         .stats = l->stats};
    lay_out(l, training);
    param_list_set_draws(&l->params, SEED, UPDATES);
    read_signs(l);
    fill_floats(l->params.params[0].master, l->N * l->K, 0.3);
    fill_floats(l->params.params[1].master, l->N, 1);
    l->linear.draws = (DrawPlace){SEED, STEP, FIRST_ROW};
    param_list_refresh(&l->params, backend);
    if (!training) return;
    fill_floats(l->params.params[0].gradient, l->N * l->K, 1);
    fill_floats(l->params.params[1].gradient, l->N, 1);
    l->dweight_before = copy_floats(l->params.params[0].gradient, l->N * l->K);
    l->dbias_before = copy_floats(l->params.params[1].gradient, l->N);
}

static double *float_doubles(const float *values, int64_t count) {
    double *result = take_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        result[i] = values[i];
    }
    return result;
}

// A product as sums over `length` terms a[i * a_step] b[i * b_step].
typedef struct {
    const double *a, *b;
    int64_t length, a_step, b_step;
} Terms;

static void check_sum(Check *check, double value, Terms t, double start, Format dtype) {
    double sum = start, magnitude = fabs(start);
    for (int64_t i = 0; i < t.length; i++) {
        double product = t.a[i * t.a_step] * t.b[i * t.b_step];
        sum += product;
        magnitude += fabs(product);
    }
    check_value(check, value, sum, (double)(t.length + 2) * U_FP32 * magnitude + u_of(dtype) * fabs(sum));
}

static void check_fprop(const Layer *l, Tensor y, const double *x, const double *w, Check *check) {
    const double *x_values = operand_values(x, l->rows, l->K, &l->recipe, FPROP_X);
    const double *w_values = operand_values(w, l->N, l->K, &l->recipe, FPROP_W);
    for (int64_t r = 0; r < l->rows; r++) {
        for (int64_t n = 0; n < l->N; n++) {
            Terms terms = {x_values + r * l->K, w_values + n * l->K, l->K, 1, 1};
            double bias = l->has_bias ? l->params.params[1].master[n] : 0;
            check_sum(check, tensor_get(y, r, n), terms, bias, y.dtype);
        }
    }
}

static void check_dgrad(const Layer *l, Tensor dx, const double *dy, const double *w, Check *check) {
    const double *dy_values = operand_values(dy, l->rows, l->N, &l->recipe, DGRAD_DY);
    const double *w_values = operand_values(w, l->N, l->K, &l->recipe, DGRAD_W);
    for (int64_t r = 0; r < l->rows; r++) {
        for (int64_t k = 0; k < l->K; k++) {
            check_sum(check, tensor_get(dx, r, k), (Terms){dy_values + r * l->N, w_values + k, l->N, 1, l->K}, 0,
                      dx.dtype);
        }
    }
}

static void check_wgrad(const Layer *l, const double *dy, const double *x, Check *check) {
    const double *dy_values = operand_values(dy, l->rows, l->N, &l->recipe, WGRAD_DY);
    const double *x_values = operand_values(x, l->rows, l->K, &l->recipe, WGRAD_X);
    for (int64_t n = 0; n < l->N; n++) {
        for (int64_t k = 0; k < l->K; k++) {
            check_sum(check, l->params.params[0].gradient[n * l->K + k],
                      (Terms){dy_values + n, x_values + k, l->rows, l->N, l->K}, l->dweight_before[n * l->K + k],
                      FORMAT_FP32);
        }
    }
}

static void check_bias_gradient(const Layer *l, const double *dy, Check *check) {
    static const double ONE = 1;
    for (int64_t n = 0; n < l->N; n++) {
        Terms terms = {dy + n, &ONE, l->has_bias ? l->rows : 0, l->N, 0};
        check_sum(check, l->params.params[1].gradient[n], terms, l->dbias_before[n], FORMAT_FP32);
    }
}

static size_t aligned(size_t bytes) { return (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT; }

// Returns the bytes of a copy: elements, blocks' scales, and the tensor's factor.
static size_t copy_bytes(Axis axis, int64_t rows, int64_t cols, Scaling scaling) {
    bool is_nvfp4 = scaling == SCALING_NVFP4 || scaling == SCALING_NVFP4_46;
    int64_t length = scaling == SCALING_MX ? 32 : is_nvfp4 ? 16 : 128;
    int64_t high = axis == AXIS_ROWWISE ? 1 : length, wide = axis == AXIS_COLUMNWISE ? 1 : length;
    size_t blocks = (size_t)((rows + high - 1) / high * ((cols + wide - 1) / wide));
    bool is_fp32 = scaling == SCALING_BLOCK128 || scaling == SCALING_BLOCK128_FP32;
    size_t scales = blocks * (scaling == SCALING_TENSOR ? 0 : is_fp32 ? sizeof(float) : 1);
    size_t factor = scaling == SCALING_TENSOR || is_nvfp4 ? aligned(sizeof(float)) : 0;
    return aligned((size_t)(rows * cols)) + aligned(scales) + factor;
}

// The kept X is its columnwise MX copy or nothing; MX weights are only those that the recipe uses.
static void check_memory(const Layer *l) {
    const Format *format = l->recipe.format;
    bool keeps_copy = format[WGRAD_X] >= FORMAT_E4M3 && !l->input_is_remade;
    assert_true(linear_keeps_input(&l->recipe) == (format[WGRAD_X] < FORMAT_E4M3));
    const Scaling *scaling = l->recipe.scaling;
    assert_int_equal(l->plan.by_kind[MEMORY_KEPT],
                     keeps_copy ? copy_bytes(AXIS_COLUMNWISE, l->rows, l->K, scaling[WGRAD_X]) : 0);
    bool fprop = format[FPROP_W] >= FORMAT_E4M3, dgrad = format[DGRAD_W] >= FORMAT_E4M3;
    size_t weights = (fprop ? copy_bytes(AXIS_ROWWISE, l->N, l->K, scaling[FPROP_W]) : 0) +
                     (dgrad ? copy_bytes(AXIS_COLUMNWISE, l->N, l->K, scaling[DGRAD_W]) : 0);
    if (l->recipe.square_weights) { // one copy
        weights = fprop || dgrad ? copy_bytes(AXIS_SQUARE, l->N, l->K, scaling[fprop ? FPROP_W : DGRAD_W]) : 0;
        const Param *weight = &l->params.params[0];
        assert_true(!fprop || !dgrad || weight->rowwise.elements == weight->columnwise.elements);
    }
    assert_int_equal(l->plan.by_kind[MEMORY_QUANTIZED], weights);
}

// Statistics of the quantized operands, with the blocks of the right axis and scaling; nothing of
// others.
static void check_stats(const Layer *l) {
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        Role role = operand_role((GemmOperand)i);
        int64_t rows = role == ROLE_WEIGHTS ? l->N : l->rows, cols = role == ROLE_GRADIENTS ? l->N : l->K;
        Scaling scaling = l->recipe.scaling[i];
        int64_t side = scaling == SCALING_MX ? 32 : scaling == SCALING_NVFP4 || scaling == SCALING_NVFP4_46 ? 16 : 128;
        bool quantized = l->recipe.format[i] >= FORMAT_E4M3, rowwise = i == FPROP_X || i == FPROP_W || i == DGRAD_DY;
        bool is_made_otherwise =
            l->recipe.transform[i / 2] || (i == DGRAD_W && recipe_is_from_forward(&l->recipe, DGRAD_W));
        quantized = quantized && !(role == ROLE_WEIGHTS && is_made_otherwise);
        int64_t down = (rows + side - 1) / side, across = (cols + side - 1) / side;
        int64_t blocks = rowwise ? rows * across : down * cols;
        if (is_square(&l->recipe, (GemmOperand)i)) blocks = down * across;
        assert_int_equal(l->stats[i].elements, quantized ? rows * cols : 0);
        assert_int_equal(l->stats[i].blocks, quantized ? blocks : 0);
        assert_true(!quantized || l->stats[i].amax > 0);
    }
}

// The scratch is overwritten between forward and backward, as another layer would; so is X where
// the layer keeps its own copy.
static void check_layer(Layer *l, Check *checks) {
    make_layer(l, true);
    Format dtype = l->recipe.activation_dtype;
    Tensor x = random_tensor(dtype, l->rows, l->K, 1), dy = random_tensor(l->dy_dtype, l->rows, l->N, 0.01);
    const double *x_values = tensor_doubles(x), *dy_values = tensor_doubles(dy);
    const double *w_values = float_doubles(l->params.params[0].master, l->N * l->K);
    Tensor y = take_tensor(l->y_dtype, l->rows, l->N), dx = take_tensor(dtype, l->rows, l->K);
    linear_forward(&l->linear, backend, y, source_tensor(x), true);
    bool overwritten = !linear_keeps_input(&l->recipe) && !l->input_is_remade;
    if (overwritten) memset(x.data, UNWRITTEN, tensor_bytes(x));
    memset(l->linear.scratch, UNWRITTEN, l->scratch_bytes);
    linear_backward(&l->linear, backend, dx, source_tensor(dy));
    check_padding(y);
    check_padding(dx);
    check_fprop(l, y, x_values, w_values, &checks[0]);
    check_dgrad(l, dx, dy_values, w_values, &checks[1]);
    check_wgrad(l, dy_values, x_values, &checks[2]);
    check_bias_gradient(l, dy_values, &checks[3]);
    check_memory(l);
    check_stats(l);
    param_list_free(&l->params);
    pool_release();
}

static void check_recipe(const Recipe *recipe, const char *name) {
    static const int64_t SHAPES[][3] = {{1, 31, 48},  {33, 96, 65},  {100, 257, 48}, {1, 257, 65},
                                        {33, 31, 48}, {100, 96, 65}, {64, 128, 32}};
    static const char *const GEMMS[] = {"fprop", "dgrad", "wgrad", "bias gradient"};
    Check checks[4] = {{0}};
    for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++) {
        Layer l = {.rows = SHAPES[i][0], .K = SHAPES[i][1], .N = SHAPES[i][2], .recipe = *recipe, .has_bias = i != 1};
        l.dy_dtype = recipe->activation_dtype;
        l.input_is_remade = i % 2 == 1 && linear_can_remake_input(recipe);
        l.y_dtype = i == 4 ? FORMAT_FP32 : recipe->activation_dtype; // as the LM head's logits
        check_layer(&l, checks);
    }
    printf("  %s\n", name);
    for (int i = 0; i < 4; i++) {
        check_end(&checks[i], "%s", GEMMS[i]);
    }
}

static void test_named_recipes(void **state) {
    (void)state;
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        check_recipe(&recipe, *name);
    }
}

// Weights in blocks of 32 x 32: every named recipe, and weights that only one GEMM quantizes.
static void test_square_weights(void **state) {
    (void)state;
    char label[96];
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        Error error;
        recipe.square_weights = true;
        bool two_scalings = recipe.scaling[FPROP_W] != recipe.scaling[DGRAD_W];
        assert_true(recipe_check(&recipe, &error) == !two_scalings);
        if (two_scalings) continue;
        snprintf(label, sizeof(label), "%s, square weights", *name);
        check_recipe(&recipe, label);
    }
    static const char *const CASES[][2] = {
        {"mxfp8", "fprop-w=bf16"}, {"mxfp8", "dgrad-w=bf16"}, {"mxfp8", "dgrad-w=fp32"}, {"bf16", "fprop-w=e2m1"}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe = recipe_of(CASES[i][0]);
        Error error;
        recipe.square_weights = true;
        recipe.rounding[ROLE_WEIGHTS] = (ScaleRounding)i;
        assert_true(recipe_set_operand(&recipe, CASES[i][1], &error) && recipe_check(&recipe, &error));
        snprintf(label, sizeof(label), "%s %s, weights in 32x32", CASES[i][0], CASES[i][1]);
        check_recipe(&recipe, label);
    }
}

// One copy can't have two formats.
static void test_square_weights_refused(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8");
    Error error;
    assert_true(recipe_set_operand(&recipe, "dgrad-w=e5m2", &error));
    assert_true(recipe_check(&recipe, &error));
    recipe.square_weights = true;
    assert_false(recipe_check(&recipe, &error));
    assert_non_null(strstr(error.message, "--weight-scaling 2d"));
    assert_non_null(strstr(error.message, "e4m3 and e5m2"));
}

// What 2-D scaling is for: half the memory of the copies, but for the scales.
static void test_square_weights_take_half(void **state) {
    (void)state;
    enum { N = 1024, K = 768 };
    size_t bytes[2];
    for (int square = 0; square < 2; square++) {
        Layer l = {.rows = 32, .K = K, .N = N, .recipe = recipe_of("mxfp8")};
        l.recipe.square_weights = square;
        make_layer(&l, true);
        bytes[square] = l.plan.by_kind[MEMORY_QUANTIZED];
        param_list_free(&l.params);
        pool_release();
    }
    assert_int_equal(bytes[0], 2 * (N * K + N * K / 32));
    assert_int_equal(bytes[1], N * K + N * K / 1024);
}

// Single operands, as --operand takes them.
static void test_adjusted_operands(void **state) {
    (void)state;
    static const char *const CASES[][3] = {
        {"mxfp8", "wgrad-x=bf16"},  {"mxfp8", "fprop-x=fp32"}, {"mxfp8", "fprop-w=fp32"},
        {"mxfp8", "wgrad-dy=bf16"}, {"mxfp8", "wgrad-x=e5m2"}, {"mxfp8", "dgrad-w=fp32", "dgrad-dy=bf16"},
        {"bf16", "dgrad-dy=e5m2"},  {"bf16", "wgrad-x=e2m1"},  {"bf16", "fprop-w=fp32", "fprop-x=e4m3"},
        {"fp32", "fprop-x=bf16"},   {"fp32", "wgrad-x=bf16"},  {"fp32", "wgrad-dy=bf16", "dgrad-dy=bf16"},
        {"fp32", "fprop-w=e4m3"},   {"fp32", "dgrad-w=bf16"},  {"fp32", "wgrad-dy=e3m2", "wgrad-x=bf16"},
        {"fp32", "wgrad-x=e4m3"},   {"mxfp4", "fprop-x=e2m3"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe = recipe_of(CASES[i][0]);
        char name[96];
        snprintf(name, sizeof(name), "%s %s %s", CASES[i][0], CASES[i][1], CASES[i][2] ? CASES[i][2] : "");
        for (int j = 1; j < 3 && CASES[i][j]; j++) {
            Error error;
            if (!recipe_set_operand(&recipe, CASES[i][j], &error)) fail_msg("%s", error.message);
        }
        check_recipe(&recipe, name);
    }
}

// A format and a rounding for each role.
static void test_adjusted_roles(void **state) {
    (void)state;
    static const struct {
        const char *base, *formats[NUM_ROLES]; // of weights, activations, gradients
        ScaleRounding rounding[NUM_ROLES];
    } CASES[] = {
        {"mxfp8", {"e4m3", "e4m3", "e5m2"}, {SCALE_FLOOR, SCALE_CEIL, SCALE_EVEN}},
        {"mxfp8", {"e2m1", "bf16", "e5m2"}, {SCALE_EVEN, SCALE_RCEIL, SCALE_FLOOR}},
        {"fp32", {"e4m3", "e4m3", "e4m3"}, {SCALE_CEIL, SCALE_EVEN, SCALE_RCEIL}},
        {"fp32", {"fp32", "bf16", "e2m3"}, {SCALE_RCEIL, SCALE_RCEIL, SCALE_CEIL}},
        {"bf16", {"fp32", "e3m2", "bf16"}, {SCALE_RCEIL, SCALE_EVEN, SCALE_RCEIL}},
        {"mxfp4", {"e2m3", "e2m1", "fp32"}, {SCALE_FLOOR, SCALE_FLOOR, SCALE_FLOOR}},
        {"fp8-current", {"e4m3", "e4m3", "e4m3"}, {SCALE_RCEIL, SCALE_RCEIL, SCALE_RCEIL}},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe = recipe_of(CASES[i].base);
        for (int role = 0; role < NUM_ROLES; role++) {
            Error error;
            if (!recipe_set_role_format(&recipe, (Role)role, CASES[i].formats[role], &error)) {
                fail_msg("%s", error.message);
            }
            recipe.rounding[role] = CASES[i].rounding[role];
        }
        char name[96];
        snprintf(name, sizeof(name), "%s: weights %s, activations %s, gradients %s", CASES[i].base, CASES[i].formats[0],
                 CASES[i].formats[1], CASES[i].formats[2]);
        check_recipe(&recipe, name);
    }
}

// Transforms of each GEMM alone and of all, with every size and both kinds of signs, whichever of
// the operands are quantized, and backward operands that are made of the forward pass' values.
static void test_transforms(void **state) {
    (void)state;
    const Transform F = TRANSFORM_FIXED, R = TRANSFORM_RANDOM;
    const struct {
        const char *base, *adjustment;
        Transform transform[NUM_GEMMS];
        int64_t size;
        bool from_forward, square;
    } CASES[] = {
        {"mxfp8", NULL, {F, 0, 0}, 16, false, false},
        {"mxfp8", NULL, {0, F, 0}, 32, false, false},
        {"mxfp8", NULL, {0, 0, F}, 16, false, true},
        {"mxfp4", NULL, {R, R, R}, 64, false, false},
        {"mxfp4", NULL, {F, F, F}, 128, false, false},
        {"mxfp8", NULL, {R, 0, R}, 128, false, false},
        {"nvfp4", NULL, {0, 0, R}, 16, false, true},
        {"mxfp8-weights-only", NULL, {F, R, 0}, 32, false, false},
        {"mxfp8", "fprop-w=bf16", {F, 0, 0}, 16, false, false},
        {"mxfp8", "dgrad-w=bf16", {0, R, 0}, 64, false, true},
        {"mxfp8", "dgrad-dy=bf16", {0, F, F}, 16, false, false},
        {"mxfp8", "wgrad-dy=bf16", {0, 0, F}, 16, false, false},
        {"mxfp8", "wgrad-x=bf16", {0, 0, F}, 32, false, false},
        {"fp32", "fprop-w=e4m3", {F, 0, 0}, 64, false, false},
        {"fp32", "dgrad-dy=e2m1", {0, R, 0}, 32, false, false},
        {"mxfp8", NULL, {0, 0, 0}, 16, true, false},
        {"mxfp4", NULL, {0, R, R}, 64, true, false},
        {"nvfp4", NULL, {0, 0, F}, 16, true, true},
        {"nvfp4-46", NULL, {0, 0, 0}, 16, true, false},
        {"fp8-current", NULL, {0, F, 0}, 16, true, false},
        {"mxfp8-nvfp4", NULL, {0, 0, R}, 16, true, false},
        {"mxfp8", "wgrad-x=bf16", {0, 0, 0}, 16, true, false},
        {"fp32", "fprop-x=e4m3", {0, 0, 0}, 16, true, false},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe = recipe_of(CASES[i].base);
        Error error;
        char name[160];
        const char *adjustment = CASES[i].adjustment;
        if (adjustment && !recipe_set_operand(&recipe, adjustment, &error)) fail_msg("%s", error.message);
        memcpy(recipe.transform, CASES[i].transform, sizeof(recipe.transform));
        recipe.hadamard_size = CASES[i].size;
        recipe.from_forward = CASES[i].from_forward;
        recipe.square_weights = CASES[i].square;
        if (!recipe_check(&recipe, &error)) fail_msg("%s", error.message);
        snprintf(name, sizeof(name), "%s %s, Hadamard %s %s %s by %lld%s", CASES[i].base, adjustment ? adjustment : "",
                 TRANSFORM_NAMES[recipe.transform[0]], TRANSFORM_NAMES[recipe.transform[1]],
                 TRANSFORM_NAMES[recipe.transform[2]], (long long)recipe.hadamard_size,
                 recipe.from_forward ? ", from forward" : "");
        check_recipe(&recipe, name);
    }
}

// Signs are Philox's of the seed, the updates, the parameter and the GEMM; fixed ones stay.
static void test_signs(void **state) {
    (void)state;
    Layer l = {.rows = 32, .K = 32, .N = 64, .recipe = recipe_of("mxfp4")};
    memcpy(l.recipe.transform, (Transform[]){TRANSFORM_RANDOM, TRANSFORM_FIXED, TRANSFORM_RANDOM},
           sizeof(l.recipe.transform));
    make_layer(&l, true);
    const Hadamard *hadamard = l.params.params[0].hadamard;
    for (int64_t updates = 0; updates < 3; updates++) {
        param_list_set_draws(&l.params, 1234567890123, updates);
        for (uint64_t gemm = 0; gemm < NUM_GEMMS; gemm++) {
            uint32_t expected[4] = {0xD7E8D7E8, 0xD7E8D7E8, 0xD7E8D7E8, 0xD7E8D7E8};
            if (gemm != GEMM_DGRAD) philox(expected, 1234567890123, ((uint64_t)3 << 60) + gemm, (uint64_t)updates);
            assert_memory_equal(hadamard[gemm].minus, expected, sizeof(expected));
        }
    }
    param_list_free(&l.params);
    pool_release();
}

// Evaluation lays out less and computes the same Y; fewer rows than planned are allowed, and then
// all of them again.
static void test_forward_alone(void **state) {
    (void)state;
    for (const char *const *name = recipe_names(); *name; name++) {
        Layer l = {.rows = 33, .K = 96, .N = 65, .recipe = recipe_of(*name), .has_bias = true};
        make_layer(&l, false);
        assert_int_equal(l.plan.by_kind[MEMORY_KEPT] + l.plan.by_kind[MEMORY_GRADIENTS], 0);
        Format dtype = l.recipe.activation_dtype;
        Tensor x = random_tensor(dtype, 33, 96, 1), y = take_tensor(dtype, 33, 65), again = take_tensor(dtype, 33, 65);
        linear_forward(&l.linear, backend, y, source_tensor(x), false);
        linear_forward(&l.linear, backend, tensor_rows(again, 0, 7), source_tensor(tensor_rows(x, 0, 7)), false);
        linear_forward(&l.linear, backend, again, source_tensor(x), false);
        check_same_tensor(y, again);
        Check check = {0};
        check_fprop(&l, y, tensor_doubles(x), float_doubles(l.params.params[0].master, 65 * 96), &check);
        check_end(&check, "%s, forward alone", *name);
        param_list_free(&l.params);
        pool_release();
    }
}

// Elements of every format and scaling rounded stochastically: of one role, and of all with a
// prescale.
static void test_element_roundings(void **state) {
    (void)state;
    static const char *const RECIPES[] = {"mxfp8", "mxfp6-e2m3",    "mxfp6-e3m2", "mxfp4",      "mxfp8-e5m2-gradients",
                                          "nvfp4", "fp8-blockwise", "nvfp4-46",   "fp8-current"};
    char label[96];
    for (size_t i = 0; i < sizeof(RECIPES) / sizeof(RECIPES[0]); i++) {
        for (int role = 0; role <= NUM_ROLES; role++) {
            Recipe recipe = recipe_of(RECIPES[i]);
            if (role == NUM_ROLES) recipe.prescale = 0.75f;
            for (int r = 0; r < NUM_ROLES; r++) {
                if (role == NUM_ROLES || r == role) recipe.element_rounding[r] = ROUND_STOCHASTIC;
            }
            snprintf(label, sizeof(label), "%s, stochastic: %s", RECIPES[i],
                     role < NUM_ROLES ? ROLE_NAMES[role] : "all, after 3/4");
            check_recipe(&recipe, label);
        }
    }
}

// Means of products
// -------------------------------------------------------------------------------------------------

enum { MEAN_ROWS = 64, MEAN_K = 32, MEAN_N = 64, MEAN_STEPS = 1024, MEAN_OUTPUTS = MEAN_ROWS * MEAN_K };

// A product of each step: sums and sums of squares of its values' errors, and of the factor by
// which it is the exact one, less 1.
typedef struct {
    const double *exact, *allowed; // values, and what their means may err by without chance
    double *sums, *squares, factor_sum, factor_squares;
} Means;

// Returns exact values of sums over MEAN_N = MEAN_ROWS terms, and what is allowed beside chance: a
// probability errs by up to 2^-17 of the distance between elements, which is below 2/3 of a block's
// amax, so of the vector's norm, which a transform keeps. The rest is FP32's.
static Means exact_products(const double *a, const double *b, int64_t a_step, int64_t a_next) {
    enum { LENGTH = MEAN_N };
    double *exact = take_doubles(MEAN_OUTPUTS), *allowed = take_doubles(MEAN_OUTPUTS);
    Means m = {exact, allowed, take_doubles(MEAN_OUTPUTS), take_doubles(MEAN_OUTPUTS), 0, 0};
    for (int i = 0; i < MEAN_OUTPUTS; i++) {
        double sum = 0, aa = 0, bb = 0;
        for (int64_t t = 0; t < LENGTH; t++) {
            double x = a[i / MEAN_K * a_next + t * a_step], y = b[t * MEAN_K + i % MEAN_K];
            sum += x * y, aa += x * x, bb += y * y;
        }
        exact[i] = sum;
        allowed[i] = sqrt(aa * bb) * (4.0 / 3 * 0x1p-17 * sqrt(LENGTH) + 4 * sum_error(LENGTH));
        m.sums[i] = m.squares[i] = 0;
    }
    return m;
}

static void add_step(Means *m, const double *values) {
    double dot = 0, norm = 0;
    for (int i = 0; i < MEAN_OUTPUTS; i++) {
        double error = values[i] - m->exact[i];
        m->sums[i] += error;
        m->squares[i] += error * error;
        dot += error * m->exact[i];
        norm += m->exact[i] * m->exact[i];
    }
    m->factor_sum += dot / norm;
    m->factor_squares += dot / norm * (dot / norm);
}

// Returns seven standard deviations of the mean of so many draws.
static double seven_deviations(double sum, double squares) {
    double mean = sum / MEAN_STEPS;
    return 7 * sqrt((squares / MEAN_STEPS - mean * mean) / (MEAN_STEPS - 1));
}

// Checks a product's means, and that one of operands rounded to nearest is far from within their
// bounds.
static void check_means(const Means *m, const double *nearest, const char *name) {
    Check values = {0}, factor = {0};
    double far = 0, allowed = 0, norm = 0;
    for (int i = 0; i < MEAN_OUTPUTS; i++) {
        double bound = seven_deviations(m->sums[i], m->squares[i]) + m->allowed[i];
        check_value(&values, m->sums[i] / MEAN_STEPS, 0, bound);
        far = fmax(far, fabs(nearest[i] - m->exact[i]) / bound);
        allowed += fabs(m->exact[i]) * m->allowed[i];
        norm += m->exact[i] * m->exact[i];
    }
    double bound = seven_deviations(m->factor_sum, m->factor_squares) + allowed / norm;
    check_value(&factor, m->factor_sum / MEAN_STEPS, 0, bound);
    check_end(&values, "%s, means of %d draws", name, MEAN_STEPS);
    check_end(&factor, "%s, their factor, within %.5f of 1", name, bound);
    printf("    %s to nearest: off by %.1f bounds\n", name, far);
    assert_true(far > 3);
}

static void run_step(Layer *l, Tensor x, Tensor dy, Tensor y, Tensor dx, int64_t step) {
    param_list_set_draws(&l->params, SEED, step);
    l->linear.draws = (DrawPlace){SEED, step, 0};
    param_list_refresh(&l->params, backend);
    memset(l->params.params[0].gradient, 0, MEAN_N * MEAN_K * sizeof(float));
    linear_forward(&l->linear, backend, y, source_tensor(x), true);
    linear_backward(&l->linear, backend, dx, source_tensor(dy));
}

// The mean over many steps' draws of mxfp4-sr's dX and dW is the exact product, with random
// transforms and without: within seven standard deviations of the mean, which the steps' own spread
// tells. So is the factor that all values share, which 3/4 without 16/9 would change. All is in
// FP32 but for the elements.
static void test_means_of_products(void **state) {
    (void)state;
    for (int is_transformed = 0; is_transformed < 2; is_transformed++) {
        Layer l = {.rows = MEAN_ROWS, .K = MEAN_K, .N = MEAN_N, .recipe = recipe_of("mxfp4-sr")};
        l.recipe.activation_dtype = FORMAT_FP32;
        l.dy_dtype = l.y_dtype = FORMAT_FP32;
        if (!is_transformed) memset(l.recipe.transform, 0, sizeof(l.recipe.transform));
        Layer to_nearest = l;
        memset(to_nearest.recipe.element_rounding, 0, sizeof(to_nearest.recipe.element_rounding));
        make_layer(&l, true);
        make_layer(&to_nearest, true);
        float *master = l.params.params[0].master;
        memcpy(to_nearest.params.params[0].master, master, MEAN_N * MEAN_K * sizeof(float));
        Tensor x = random_tensor(FORMAT_FP32, MEAN_ROWS, MEAN_K, 1);
        Tensor dy = random_tensor(FORMAT_FP32, MEAN_ROWS, MEAN_N, 1);
        Tensor y = take_tensor(FORMAT_FP32, MEAN_ROWS, MEAN_N), dx = take_tensor(FORMAT_FP32, MEAN_ROWS, MEAN_K);
        const double *dy_values = tensor_doubles(dy);
        Means of_dx = exact_products(dy_values, float_doubles(master, MEAN_N * MEAN_K), 1, MEAN_N);
        Means of_dw = exact_products(dy_values, tensor_doubles(x), MEAN_N, 1);
        double *dw_values = take_doubles(MEAN_OUTPUTS), *dx_values = take_doubles(MEAN_OUTPUTS);
        for (int64_t step = 0; step <= MEAN_STEPS; step++) {
            Layer *layer = step < MEAN_STEPS ? &l : &to_nearest;
            run_step(layer, x, dy, y, dx, step);
            for (int i = 0; i < MEAN_OUTPUTS; i++) {
                dx_values[i] = tensor_get(dx, i / MEAN_K, i % MEAN_K);
                dw_values[i] = layer->params.params[0].gradient[i];
            }
            if (layer == &to_nearest) continue;
            add_step(&of_dx, dx_values);
            add_step(&of_dw, dw_values);
        }
        check_means(&of_dx, dx_values, is_transformed ? "dX, transformed" : "dX");
        check_means(&of_dw, dw_values, is_transformed ? "dW, transformed" : "dW");
        param_list_free(&l.params);
        param_list_free(&to_nearest.params);
        pool_release();
    }
}

// wgrad adds to what is there, and a step of fewer rows than planned leaves the next one whole.
static void test_rows_vary(void **state) {
    (void)state;
    enum { ROWS = 100, PART = 41, K = 96, N = 48 };
    for (const char *const *name = recipe_names(); *name; name++) {
        Layer l = {.rows = ROWS, .K = K, .N = N, .recipe = recipe_of(*name), .has_bias = true};
        make_layer(&l, true);
        Format dtype = l.recipe.activation_dtype;
        Tensor x = random_tensor(dtype, ROWS, K, 1), dy = random_tensor(dtype, ROWS, N, 1);
        Tensor y = take_tensor(dtype, ROWS, N), dx = take_tensor(dtype, ROWS, K);
        const double *w = float_doubles(l.params.params[0].master, N * K);
        int64_t parts[] = {PART, ROWS};
        for (int i = 0; i < 2; i++) {
            l.rows = parts[i];
            Tensor x_part = tensor_rows(x, 0, l.rows), dy_part = tensor_rows(dy, 0, l.rows);
            Tensor dx_part = tensor_rows(dx, 0, l.rows);
            linear_forward(&l.linear, backend, tensor_rows(y, 0, l.rows), source_tensor(x_part), true);
            linear_backward(&l.linear, backend, dx_part, source_tensor(dy_part));
            Check check = {0};
            check_dgrad(&l, dx_part, tensor_doubles(dy_part), w, &check);
            check_wgrad(&l, tensor_doubles(dy_part), tensor_doubles(x_part), &check);
            check_end(&check, "%s, %lld of %d rows", *name, (long long)l.rows, ROWS);
            memcpy(l.dweight_before, l.params.params[0].gradient, N * K * sizeof(float));
        }
        param_list_free(&l.params);
        pool_release();
    }
}

// One layer with and without statistics: with them X and dY are stored before they are quantized,
// without they are made on the way. The same bits, whatever lies where they would have been stored.
static void test_made_operands(void **state) {
    (void)state;
    enum { ROWS = 45, K = 96, N = 65 };
    int made = 0;
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        Format dtype = recipe.activation_dtype;
        Tensor x = random_tensor(dtype, ROWS, K, 1), dout = random_tensor(dtype, ROWS, N, 1);
        Tensor input = random_tensor(dtype, ROWS, N, 1), y[2], dx[2];
        float *gradients[2];
        ParamList masters;
        for (int i = 0; i < 2; i++) {
            Layer l = {.rows = ROWS, .K = K, .N = N, .recipe = recipe, .has_bias = true, .input_is_remade = i == 1};
            l.input_is_remade &= linear_can_remake_input(&recipe);
            make_layer(&l, true);
            if (i == 0) {
                masters = l.params;
            } else {
                l.linear.stats = NULL;
                memcpy(l.params.params[0].master, masters.params[0].master, N * K * sizeof(float));
                memcpy(l.params.params[1].master, masters.params[1].master, N * sizeof(float));
                param_list_refresh(&l.params, backend);
            }
            bool makes_x = linear_makes_input(&l.linear, true), makes_dy = linear_makes_gradient(&l.linear);
            made += makes_x + makes_dy;
            assert_false(i == 0 && (makes_x || makes_dy));
            Tensor stored = take_tensor(dtype, ROWS, K), dy = copy_tensor(dout);
            backend->activation_forward(stored, x, ACTIVATION_GELU);
            if (!makes_dy) backend->activation_backward(dy, NULL, dy, input, ACTIVATION_GELU);
            Source x_source = makes_x ? (Source){.kind = SOURCE_ACTIVATION, .x = x} : source_tensor(stored);
            Source dy_source =
                makes_dy ? (Source){.kind = SOURCE_ACTIVATION_BACKWARD, .x = input, .dout = dy} : source_tensor(dy);
            y[i] = take_tensor(dtype, ROWS, N);
            dx[i] = take_tensor(dtype, ROWS, K);
            memset(l.params.gradients, 0, (size_t)l.params.gradients_count * sizeof(float));
            if (makes_x) memset(stored.data, UNWRITTEN, tensor_bytes(stored));
            linear_forward(&l.linear, backend, y[i], x_source, true);
            linear_backward(&l.linear, backend, dx[i], dy_source);
            gradients[i] = copy_floats(l.params.gradients, l.params.gradients_count);
            if (i == 0) continue;
            check_same_floats(gradients[0], gradients[1], l.params.gradients_count);
            param_list_free(&l.params);
        }
        param_list_free(&masters);
        check_same_tensor(y[0], y[1]);
        check_same_tensor(dx[0], dx[1]);
        pool_release();
    }
    assert_true(made > 8); // most recipes quantize both
    printf("    %d operands made on the way\n", made);
}

// Where a GEMM's product went and whether its sum could be a fast one, in the order of calls.
static struct {
    const void *out;
    bool fast_sum;
} seen[NUM_GEMMS];
static int num_seen;

static void gemm_that_is_seen(Tensor d, Operand a, Operand b, GemmOptions options) {
    assert_true(num_seen < NUM_GEMMS);
    seen[num_seen].out = d.data;
    seen[num_seen++].fast_sum = options.fast_sum;
    backend->gemm(d, a, b, options);
}

// Fprop alone may keep fewer bits, in training and evaluation: gradients are summed in full.
static void test_fast_sums(void **state) {
    (void)state;
    enum { ROWS = 32, K = 64, N = 48 };
    Backend spy = *backend;
    spy.gemm = gemm_that_is_seen;
    for (const char *const *name = recipe_names(); *name; name++) {
        for (int training = 0; training < 2; training++) {
            Layer l = {.rows = ROWS, .K = K, .N = N, .recipe = recipe_of(*name), .has_bias = true};
            make_layer(&l, training);
            Format dtype = l.recipe.activation_dtype;
            Tensor x = random_tensor(dtype, ROWS, K, 1), dy = random_tensor(dtype, ROWS, N, 1);
            Tensor y = take_tensor(dtype, ROWS, N), dx = take_tensor(dtype, ROWS, K);
            num_seen = 0;
            linear_forward(&l.linear, &spy, y, source_tensor(x), training);
            if (training) linear_backward(&l.linear, &spy, dx, source_tensor(dy));
            assert_int_equal(num_seen, training ? NUM_GEMMS : 1);
            const void *const outs[NUM_GEMMS] = {y.data, dx.data, l.params.params[0].gradient};
            for (int i = 0; i < num_seen; i++) {
                assert_ptr_equal(seen[i].out, outs[i]);
                assert_int_equal(seen[i].fast_sum, i == GEMM_FPROP);
            }
            param_list_free(&l.params);
            pool_release();
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_named_recipes),
        cmocka_unit_test(test_adjusted_operands),
        cmocka_unit_test(test_adjusted_roles),
        cmocka_unit_test(test_transforms),
        cmocka_unit_test(test_means_of_products),
        cmocka_unit_test(test_element_roundings),
        cmocka_unit_test(test_signs),
        cmocka_unit_test(test_forward_alone),
        cmocka_unit_test(test_rows_vary),
        cmocka_unit_test(test_made_operands),
        cmocka_unit_test(test_fast_sums),
        cmocka_unit_test(test_square_weights),
        cmocka_unit_test(test_square_weights_refused),
        cmocka_unit_test(test_square_weights_take_half),
    };
    backend = backend_cpu();
    for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
        fill_values(format);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
