# make          builds ./train_gpt_mxfp8 and the tools in build/, with the libraries it finds
# make demo     installs what is missing, builds, and trains a small GPT on Shakespeare
# make test     installs what is missing, builds, and runs the tests
# make help     lists the rest

ARCH ?= native
BUILD ?= build
PYTHON := .venv/bin/python
# make V=1 shows the commands.
Q := $(if $(V),,@)

# All cores, unless -j says how many; a make within a make shares those of the first.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc)
endif

# Of goals that each call make for a build of all one waits for the other.
ifneq ($(word 2,$(filter demo test test-% compare proxy law bench profile coverage fuzz,$(MAKECMDGOALS))),)
.NOTPARALLEL:
endif

ifeq ($(abspath $(BUILD)),$(CURDIR))
$(error BUILD=$(BUILD) is where the sources are: choose another directory)
endif

.DEFAULT_GOAL := all
include dev/libraries.mk

# No -ffast-math, ever: scales and elements need IEEE subnormals and NaN. Without errno sqrt is an
# instruction; where nobody looks at exceptions' flags, loops with a choice in them vectorise, and
# values don't change.
# WERROR=1, as in CI, makes a warning an error: not for people, whose compiler may know new ones.
CFLAGS := -std=gnu11 -O3 -march=$(ARCH) -fno-math-errno -fno-trapping-math -Wall -Wextra $(if $(WERROR),-Werror) \
    -D_GNU_SOURCE -fopenmp -MMD -MP -g -I. $(FOUND_CFLAGS) $(EXTRA_CFLAGS)
LDFLAGS := $(EXTRA_CFLAGS)
LDLIBS := $(FOUND_LDLIBS) -lm
ifneq ($(filter aarch64%,$(shell $(CC) -dumpmachine 2>/dev/null)),)
CFLAGS := $(subst -march=,-mcpu=,$(CFLAGS))
endif
# What is for AMX is built whatever processor ARCH names, and looks for it as it runs. Compilers that
# have the instructions but can't ask for them (clang 14) leave it out.
AMX_CFLAGS := $(shell flags='-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16'; \
    echo 'int main(void) { return __builtin_cpu_supports("amx-bf16"); }' | \
    $(CC) $$flags -fsyntax-only -x c - >/dev/null 2>&1 && echo "$$flags")
CFLAGS += $(if $(AMX_CFLAGS),-DHAVE_AMX)
# QUICK_KERNELS=1 is for tests where there is no GPU: kernels are compiled in a sixth of the time,
# where nvcc has an option for it, and would be slow. A program that has them refuses a GPU.
QUICK := $(if $(filter 11,$(QUICK_KERNELS)$(CUDA)),$(if $(shell $(NVCC) --help | grep -m 1 -e --Ofast-compile),quick))
NVCCFLAGS := -std=c++17 -O3 $(if $(QUICK),--Ofast-compile=max) -lineinfo $(GENCODE) -I. \
    $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror) \
    -Xcompiler -Wall,-Wextra,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics $(EXTRA_NVCCFLAGS)

# ------------------------------------------------------------------------------------------------
# What is built: everything in llmc/ goes into one archive, from which each program takes what it
# calls. Without CUDA llmc/cuda/none.c answers in its place; what says how much a card would take
# needs none of CUDA's headers, and stays.

SOURCES := $(filter-out $(if $(filter 1,$(ONEDNN)),,llmc/cpu/onednn.c),$(wildcard llmc/*/*.c))
ifeq ($(CUDA),1)
# What takes longest to compile comes first.
SOURCES := llmc/cuda/quantize_scaled.cu llmc/cuda/quantize.cu $(filter-out llmc/cuda/none.c,$(SOURCES)) \
           $(filter-out llmc/cuda/quantize_scaled.cu llmc/cuda/quantize.cu,$(wildcard llmc/cuda/*.cu))
else
SOURCES := $(filter-out llmc/cuda/%,$(SOURCES)) $(addprefix llmc/cuda/,none.c sizes.c gemm_path.c gemm_workspace.c)
endif
LIBRARY := $(BUILD)/libllmc.a
PROGRAMS := $(addprefix $(BUILD)/,train_gpt_mxfp8 mxcast dump_logits dump_tokens proxy)

all: $(PROGRAMS) train_gpt_mxfp8
	@echo "$$FOUND"

train_gpt_mxfp8: $(BUILD)/train_gpt_mxfp8
	@ln -sf $< $@

# The libraries that are there, and what is missing without the others.
found:
	@echo "$$FOUND"
export FOUND

LINK = @echo '  LINK $@' && $(CC) -fopenmp $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ $(LDLIBS)

$(BUILD)/train_gpt_mxfp8: $(BUILD)/train_gpt_mxfp8.o $(LIBRARY)
	$(LINK)

$(BUILD)/proxy: $(addprefix $(BUILD)/dev/proxy/,proxy.o model.o data.o authors.o $(if $(filter 1,$(CUDA)),authors_cuda.o)) $(LIBRARY)
	$(LINK)

$(BUILD)/mxcast $(BUILD)/dump_logits $(BUILD)/dump_tokens: $(BUILD)/%: $(BUILD)/dev/%.o $(LIBRARY)
	$(LINK)

$(LIBRARY): $(patsubst %,$(BUILD)/%.o,$(basename $(SOURCES)))
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

# Changed settings rebuild all objects.
SETTINGS := $(CC) $(CFLAGS) $(LDLIBS) $(SOURCES) $(if $(filter 1,$(CUDA)),$(NVCC) $(GENCODE) $(EXTRA_NVCCFLAGS))
$(BUILD)/settings: FORCE
	@mkdir -p $(BUILD)
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

$(BUILD)/%.o: %.c $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) $(CFLAGS) -c $< -o $@

# How kernels are compiled, which the rest doesn't depend on.
$(BUILD)/kernels: FORCE
	@mkdir -p $(BUILD)
	@echo '$(or $(QUICK),for use)' | cmp -s - $@ || echo '$(or $(QUICK),for use)' > $@

# Host code in .cu files is C.
$(BUILD)/%.o: %.cu $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) -x c $(CFLAGS) -c $< -o $@

# The CUDA backend: kernels by nvcc, what only calls libraries by the C compiler.
define compile_kernels
@mkdir -p $(@D)
@echo '  NVCC $<'
$(Q)$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
endef
$(BUILD)/llmc/cuda/%.o: llmc/cuda/%.cu $(BUILD)/settings $(BUILD)/kernels
	$(compile_kernels)
$(BUILD)/dev/proxy/%.o: dev/proxy/%.cu $(BUILD)/settings $(BUILD)/kernels
	$(compile_kernels)
$(BUILD)/llmc/cuda/device.o: $(BUILD)/kernels
$(BUILD)/llmc/cuda/device.o: CFLAGS += $(if $(QUICK),-DQUICK_KERNELS)

$(BUILD)/llmc/comm/mpi.o: CFLAGS += $(MPI_CFLAGS)
$(BUILD)/llmc/cpu/amx.o $(BUILD)/llmc/cpu/attention_amx.o: CFLAGS += $(AMX_CFLAGS)

# What --version says.
COMMIT := $(or $(shell git describe --always --dirty 2>/dev/null),unknown commit)
$(BUILD)/commit: FORCE
	@mkdir -p $(BUILD)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@
$(BUILD)/llmc/run/report.o: $(BUILD)/commit
$(BUILD)/llmc/run/report.o: CFLAGS += -DCOMMIT='"$(COMMIT)"'

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ------------------------------------------------------------------------------------------------
# What people type

setup:
	@scripts/setup.sh

# What runs here at once is built without kernels where there is no GPU: they take minutes. For tests
# they are compiled quickly, unless there are some for use already, which stay.
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
FOR_HERE := $(if $(GPU),,CUDA=0)
FOR_USE = $(and $(wildcard $(BUILD)/llmc/cuda/quantize.o),$(shell grep use $(BUILD)/kernels 2>/dev/null))
FOR_TESTS = $(if $(GPU)$(FOR_USE),,QUICK_KERNELS=1)

demo: setup
	@$(MAKE) --no-print-directory all $(FOR_HERE)
	@scripts/demo.sh

test: setup
	@$(MAKE) --no-print-directory all tests $(FOR_TESTS)
	@$(PYTHON) data/demo_corpus.py --out-dir $(BUILD)/demo/data
	$(if $(NVCC),,@echo 'no nvcc was found: what is for GPUs is left out of these tests')
	@$(PYTHON) dev/test/run.py $(BUILD)

# COMPARE='--recipes all' and the like are options, --plan says how long it takes; the same again
# goes on where it was stopped.
compare: setup
	@$(MAKE) --no-print-directory all $(FOR_HERE)
	@$(PYTHON) data/demo_corpus.py --out-dir build/demo/data
	@$(PYTHON) scripts/compare_recipes.py --scale cpu --out-dir runs/compare $(COMPARE) -- \
	    $(if $(THREADS),--threads $(THREADS))

# PROXY='all' and the like say which experiments; what has ended isn't run again.
proxy: setup
	@$(MAKE) --no-print-directory all $(FOR_HERE)
	@$(PYTHON) dev/proxy/run.py --proxy $(BUILD)/proxy --out-dir runs/proxy \
	    $(if $(THREADS),--option threads=$(THREADS)) $(or $(PROXY),reference)

# LAW='--tiny' and the like are options; a miniature brings its own models and data.
law: setup
	@$(MAKE) --no-print-directory all $(FOR_HERE)
	@$(PYTHON) data/demo_corpus.py --out-dir build/demo/data
	@$(PYTHON) scripts/scaling_law.py --recipes bf16,mxfp8 --out-dir runs/law \
	    $(if $(filter --tiny,$(LAW)),,--models 2x2x64,3x3x96,4x4x128,6x6x192 --tokens 0.5M,1M,2M,4M) $(LAW) -- \
	    $(if $(filter --tiny,$(LAW)),,--train-data 'build/demo/data/train_*.bin' --val-data 'build/demo/data/val_*.bin' \
	    --max-seq-len 128 --batch-size 8 --learning-rate 2e-3 --warmup-steps 50 --val-steps 50) \
	    $(if $(THREADS),--threads $(THREADS))

# What was built; data sets that lie in build/ stay.
clean:
	rm -rf $(addprefix $(BUILD)/,llmc dev hostcuda avx2 test-logs) train_gpt_mxfp8
	rm -f $(PROGRAMS) $(LIBRARY) $(TESTS) $(GPU_TESTS) $(BENCHMARKS) $(addprefix $(BUILD)/,settings kernels commit bench.json gpu_test_cuda_gemm \
	    test_mx_exhaustive train_gpt_mxfp8.o train_gpt_mxfp8.d test_gpt.o test_gpt.d test_cuda_rounding.o)

include dev/developers.mk

.PHONY: all train_gpt_mxfp8 found setup demo test compare proxy law clean FORCE
.SECONDARY:
FORCE:
