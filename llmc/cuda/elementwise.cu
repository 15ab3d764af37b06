/*
Activations, rotary positions, gradients of biases, sums of multiples.

An elementwise kernel gives each thread one 16-byte access of each tensor. A sum over rows goes by
parts of CUDA_ROWS_PER_PART rows, one block for each part and tile of columns.
*/
#include "ops.cuh"

enum { BLOCK = 256 };
static const int64_t MAX_GRID_Y = 65535;

// FUNCTION of corresponding elements of a and b. A function of one takes `b` = `a`, whose second
// load the compiler drops.
template <typename A, Function FUNCTION> static __global__ void elementwise(Tensor out, Tensor a, Tensor b) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= out.cols / A::SIZE) return;
    for (int64_t row = blockIdx.y; row < out.rows; row += gridDim.y) {
        A x = row_of<A>(a, row)[i], y = row_of<A>(b, row)[i], result;
        for (int k = 0; k < A::SIZE; k++) {
            from_float(&result.x[k], FUNCTION(to_float(x.x[k]), to_float(y.x[k])));
        }
        row_of<A>(out, row)[i] = result;
    }
}

// Rows that follow one another without a gap, as one long row.
static Tensor as_one_row(Tensor tensor) { return tensor_make(tensor.data, tensor.dtype, 1, tensor.rows * tensor.cols); }

// A thread for each access of `size` elements of a row.
static dim3 row_grid(Tensor tensor, int size) {
    return dim3((unsigned)num_parts(tensor.cols, (int64_t)size * BLOCK),
                (unsigned)(tensor.rows < MAX_GRID_Y ? tensor.rows : MAX_GRID_Y));
}

template <Function FUNCTION> static void launch_elementwise(Tensor out, Tensor a, Tensor b) {
    if (out.stride == out.cols && a.stride == a.cols && b.stride == b.cols) {
        out = as_one_row(out), a = as_one_row(a), b = as_one_row(b);
    }
    bool packs = takes_packs(out) && takes_packs(a) && takes_packs(b);
    FOR_ACCESS(out.dtype, packs, CUDA_LAUNCH((elementwise<A, FUNCTION>), row_grid(out, A::SIZE), BLOCK, 0, out, a, b));
}

template <Activation ACTIVATION> MX_FUNCTION float activate_first(float x, float) { return activate<ACTIVATION>(x); }

void cuda_activation_forward(Tensor out, Tensor input, Activation activation) {
    if (activation == ACTIVATION_SWIGLU) {
        launch_elementwise<swiglu>(out, tensor_cols(input, 0, out.cols), tensor_cols(input, out.cols, out.cols));
    } else {
        FOR_ACTIVATION(activation, launch_elementwise<activate_first<ACTIVATION>>(out, input, input));
    }
}

template <typename A> static __global__ void swiglu_backward(Tensor dinput, Tensor dout, Tensor input) {
    int64_t F = dout.cols / A::SIZE, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= F) return;
    for (int64_t row = blockIdx.y; row < dout.rows; row += gridDim.y) {
        A d = row_of<A>(dout, row)[i], x = row_of<A>(input, row)[i], up = row_of<A>(input, row)[F + i], dx, dup;
        for (int k = 0; k < A::SIZE; k++) {
            float dy = to_float(d.x[k]), gate = silu_gate(to_float(x.x[k])), silu = to_float(x.x[k]) * gate;
            from_float(&dx.x[k], dy * to_float(up.x[k]) * fmaf(silu, 1.0f - gate, gate));
            from_float(&dup.x[k], dy * silu);
        }
        row_of<A>(dinput, row)[i] = dx;
        row_of<A>(dinput, row)[F + i] = dup;
    }
}

// X, Y and O: the types of elements. One element for each thread: tensors of two dtypes have no
// access in common, and what this is called between takes far longer.
template <typename O, typename X, typename Y>
static __global__ void combine(Tensor out, float a, Tensor x, float b, Tensor y) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= out.cols) return;
    for (int64_t row = blockIdx.y; row < out.rows; row += gridDim.y) {
        float other = y.data ? b * to_float(row_of<Single<Y>>(y, row)[i].x[0]) : 0.0f;
        from_float(row_of<Single<O>>(out, row)[i].x, fmaf(a, to_float(row_of<Single<X>>(x, row)[i].x[0]), other));
    }
}

template <typename O, typename X> static void launch_combine(Tensor out, float a, Tensor x, float b, Tensor y) {
    FOR_DTYPE(y.dtype, CUDA_LAUNCH((combine<O, X, T>), row_grid(out, 1), BLOCK, 0, out, a, x, b, y));
}

template <typename O> static void choose_combine(Tensor out, float a, Tensor x, float b, Tensor y) {
    FOR_DTYPE(x.dtype, (launch_combine<O, T>(out, a, x, b, y)));
}

void cuda_combine(Tensor out, float a, Tensor x, float b, Tensor y) {
    if (out.rows == 0) return;
    FOR_DTYPE(out.dtype, choose_combine<T>(out, a, x, b, y));
}

// Rotary positions

// Angles are reduced in double: t * theta^(-2i/HS) has no digits left in FP32 where t is large.
static __global__ void make_rotations(float *rotations, int64_t T, int64_t HS, double theta) {
    int64_t half = HS / 2, at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = at / half, i = at % half;
    if (t >= T) return;
    double angle = (double)t * pow(theta, -2.0 * (double)i / (double)HS);
    rotations[t * HS + i] = (float)cos(angle);
    rotations[t * HS + half + i] = (float)sin(angle);
}

void cuda_rope_rotations(float *rotations, int64_t T, int64_t HS, double theta) {
    CUDA_LAUNCH(make_rotations, (unsigned)num_parts(T * (HS / 2), BLOCK), BLOCK, 0, rotations, T, HS, theta);
}

// Heads that a thread turns with one reading of their angle. Neighbouring threads have neighbouring
// heads. No tensor that a GPU can hold has more than 2^32 threads.
enum { HEADS_PER_THREAD = 4 };

template <typename A>
static __global__ void __launch_bounds__(BLOCK)
    rope(Tensor x, const float *rotations, Sequences sequences, unsigned half, unsigned heads, float sign) {
    const int SIZE = A::SIZE;
    unsigned accesses = half / SIZE, groups = (heads + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
    unsigned thread = blockIdx.x * BLOCK + threadIdx.x, row = thread / (accesses * groups);
    if (row >= x.rows) return;
    unsigned i = thread % accesses, group = thread / accesses % groups;
    const float *cosines = rotations + position_of(sequences, row) * 2 * half + i * SIZE;
    float c[SIZE], s[SIZE];
    load_floats<SIZE>(c, cosines);
    load_floats<SIZE>(s, cosines + half);
    for (int k = 0; k < SIZE; k++) {
        s[k] *= sign;
    }
#pragma unroll
    for (unsigned j = 0; j < HEADS_PER_THREAD; j++) {
        unsigned head = j * groups + group;
        if (head >= heads) break;
        A *first = row_of<A>(x, row) + (int64_t)head * 2 * accesses + i, a = *first, b = first[accesses];
        for (int k = 0; k < SIZE; k++) {
            float from_a = to_float(a.x[k]), from_b = to_float(b.x[k]);
            from_float(&a.x[k], fmaf(from_a, c[k], -(from_b * s[k])));
            from_float(&b.x[k], fmaf(from_b, c[k], from_a * s[k]));
        }
        *first = a;
        first[accesses] = b;
    }
}

void cuda_rope(Tensor x, const float *rotations, Sequences sequences, int64_t HS, bool inverse) {
    int64_t half = HS / 2, heads = x.cols / HS, groups = num_parts(heads, HEADS_PER_THREAD);
    bool packs = takes_packs(x) && half * (int64_t)dtype_size(x.dtype) % 16 == 0;
    FOR_ACCESS(x.dtype, packs,
               CUDA_LAUNCH((rope<A>), (unsigned)num_parts(x.rows * groups * (half / A::SIZE), BLOCK), BLOCK, 0, x,
                           rotations, sequences, (unsigned)half, (unsigned)heads, inverse ? -1.0f : 1.0f));
}

// Sums over rows

// What sum_columns sums: LOADED of an access, all of them loaded before the first is used, and the
// values that it makes of that.
template <typename A> struct Stored {
    typedef A Loaded;
    Tensor in;

    __device__ __forceinline__ Loaded load(int64_t row, int64_t access) const { return row_of<A>(in, row)[access]; }
    __device__ __forceinline__ A make(const Loaded &loaded, int64_t, int64_t) const { return loaded; }
};

// An activation's gradient, which is stored too.
template <typename A, Activation ACTIVATION> struct Gradient {
    struct Loaded {
        A d, x;
    };
    Tensor dinput, dout, input;

    __device__ __forceinline__ Loaded load(int64_t row, int64_t access) const {
        return {row_of<A>(dout, row)[access], row_of<A>(input, row)[access]};
    }
    __device__ __forceinline__ A make(const Loaded &loaded, int64_t row, int64_t access) const {
        A result;
        for (int k = 0; k < A::SIZE; k++) {
            from_float(&result.x[k], activation_gradient<ACTIVATION>(to_float(loaded.d.x[k]), to_float(loaded.x.x[k])));
        }
        row_of<A>(dinput, row)[access] = result;
        return result;
    }
};

// Block `part * tiles + tile` sums `rows_per_part` rows of WARP accesses; to row `part` of sums,
// or, where there is one part alone, added to what is in `first` and `second`.
template <typename A, typename From>
static __global__ void __launch_bounds__(SUM_BLOCK) sum_columns(float *first, float *second, int64_t split, From from,
                                                                int64_t rows, int64_t cols, int64_t rows_per_part) {
    const int SIZE = A::SIZE;
    __shared__ __align__(16) float partial[SUM_WARPS][WARP * SIZE];
    unsigned tiles = (unsigned)((cols + WARP * SIZE - 1) / (WARP * SIZE));
    int64_t part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int64_t access = tile * WARP + threadIdx.x % WARP;
    int64_t row = part * rows_per_part, end = row + rows_per_part < rows ? row + rows_per_part : rows;

    float sum[SIZE] = {0};
    if (access < cols / SIZE) {
        for (row += threadIdx.x / WARP; row < end; row += ROWS_IN_FLIGHT * SUM_WARPS) {
            typename From::Loaded loaded[ROWS_IN_FLIGHT];
#pragma unroll
            for (int r = 0; r < ROWS_IN_FLIGHT; r++) {
                int64_t at = row + r * SUM_WARPS;
                loaded[r] = from.load(at < end ? at : row, access);
            }
#pragma unroll
            for (int r = 0; r < ROWS_IN_FLIGHT; r++) {
                int64_t at = row + r * SUM_WARPS;
                if (at >= end) continue;
                A a = from.make(loaded[r], at, access);
                for (int k = 0; k < SIZE; k++) {
                    sum[k] += to_float(a.x[k]);
                }
            }
        }
    }
    float total = sum_over_warps<SIZE>(partial, sum);
    int64_t col = tile * WARP * SIZE + threadIdx.x;
    if (threadIdx.x >= WARP * SIZE || col >= cols) return;
    if (rows_per_part < rows) {
        first[part * cols + col] = total;
    } else if (col < split) {
        first[col] += total;
    } else {
        second[col - split] += total;
    }
}

// Sums as sum_columns does; returns the number of parts.
template <typename A, typename From>
static int64_t launch_sum(float *first, float *second, int64_t split, From from, int64_t rows, int64_t cols,
                          float *scratch) {
    int64_t parts = num_parts(rows, CUDA_ROWS_PER_PART), tiles = num_parts(cols, WARP * A::SIZE);
    CUDA_LAUNCH((sum_columns<A, From>), (unsigned)(parts * tiles), SUM_BLOCK, 0, parts > 1 ? scratch : first, second,
                split, from, rows, cols, CUDA_ROWS_PER_PART);
    return parts;
}

void cuda_sum_columns(float *first, float *second, int64_t split, Tensor in, float *scratch) {
    int64_t parts;
    do {
        FOR_ACCESS(in.dtype, takes_packs(in),
                   parts = launch_sum<A>(first, second, split, Stored<A>{in}, in.rows, in.cols, scratch));
        in = tensor_make(scratch, FORMAT_FP32, parts, in.cols);
        scratch += parts * in.cols;
    } while (parts > 1);
}

void cuda_bias_backward(float *dbias, Tensor dout) {
    float *scratch = (float *)cuda_workspace(cuda_reduction_workspace(dout.rows, dout.cols));
    cuda_sum_columns(dbias, NULL, dout.cols, dout, scratch);
}

// An activation's gradient

template <Activation ACTIVATION> static void gradient_and_sums(Tensor dinput, float *dbias, Tensor dout, Tensor input) {
    int64_t rows = dinput.rows, cols = dinput.cols, parts;
    float *scratch = (float *)cuda_workspace(cuda_reduction_workspace(rows, cols));
    bool packs = takes_packs(dinput) && takes_packs(dout) && takes_packs(input);
    FOR_ACCESS(dinput.dtype, packs,
               parts =
                   launch_sum<A>(dbias, NULL, cols, Gradient<A, ACTIVATION>{dinput, dout, input}, rows, cols, scratch));
    Tensor sums = tensor_make(scratch, FORMAT_FP32, parts, cols);
    if (parts > 1) cuda_sum_columns(dbias, NULL, cols, sums, scratch + parts * cols);
}

static void swiglu_gradient(Tensor dinput, Tensor dout, Tensor input) {
    Tensor half = tensor_cols(input, dout.cols, dout.cols), dhalf = tensor_cols(dinput, dout.cols, dout.cols);
    bool packs =
        takes_packs(dout) && takes_packs(half) && takes_packs(dhalf) && takes_packs(input) && takes_packs(dinput);
    FOR_ACCESS(dout.dtype, packs,
               CUDA_LAUNCH((swiglu_backward<A>), row_grid(dout, A::SIZE), BLOCK, 0, dinput, dout, input));
}

void cuda_activation_backward(Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation) {
    if (activation == ACTIVATION_SWIGLU) {
        swiglu_gradient(dinput, dout, input);
        if (dbias) cuda_bias_backward(dbias, dinput);
    } else if (dbias && dinput.rows > 0) {
        FOR_ACTIVATION(activation, gradient_and_sums<ACTIVATION>(dinput, dbias, dout, input));
    } else {
        FOR_ACTIVATION(activation, launch_elementwise<activation_gradient<ACTIVATION>>(dinput, dout, input));
    }
}
