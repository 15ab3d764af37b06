# make          builds ./train_gpt_mxfp8 and the tools in build/, with the libraries it finds
# make demo     installs what is missing, builds, and trains a small GPT on Shakespeare in two and a half minutes
# make test     installs what is missing, builds, and runs every test
# make help     lists the rest

ARCH ?= native
COMMA := ,
BUILD ?= build
PYTHON := .venv/bin/python
# make V=1 shows the commands.
Q := $(if $(V),,@)

# No -ffast-math, ever: scales and elements need IEEE subnormals and NaN. Without errno sqrt is an instruction.
CFLAGS := -std=gnu11 -O3 -march=$(ARCH) -fno-math-errno -Wall -Wextra -Werror -D_GNU_SOURCE -fopenmp -MMD -MP -g $(EXTRA_CFLAGS)
LDLIBS := -lm
LDFLAGS := $(EXTRA_CFLAGS)

ifneq ($(filter aarch64%,$(shell $(CC) -dumpmachine)),)
CFLAGS := $(subst -march=,-mcpu=,$(CFLAGS))
endif

# ---------------------------------------------------------------------------------------------------------------------
# Libraries: all but libc are optional. ONEDNN=0 and the like leave one out that is there.

has_header = $(shell printf '\043include <$(1)>\n' | $(CC) $(2) -E -x c - >/dev/null 2>&1 && echo 1)
# Of another interface than versions 2 and 3 nothing is known.
ONEDNN ?= $(shell printf '\043include <oneapi/dnnl/dnnl_version.h>\n\043if DNNL_VERSION_MAJOR < 2 || DNNL_VERSION_MAJOR > 3\n\043error\n\043endif\n' | \
    $(CC) -E -x c - >/dev/null 2>&1 && echo 1)
CJSON ?= $(call has_header,cjson/cJSON.h)
CMOCKA := $(call has_header,cmocka.h,-include stdarg.h -include stddef.h -include setjmp.h -include stdint.h)
MPICC := $(shell command -v mpicc)
MPI ?= $(if $(MPICC),$(if $(shell $(MPICC) --showme:link 2>/dev/null),1))
NVCC := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc) $(CUDA_PATH:%=%/bin/nvcc)) $(shell command -v nvcc) \
    $(wildcard /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc) $(lastword $(sort $(wildcard /usr/local/cuda-*/bin/nvcc))))
CUDA_INCLUDE := $(if $(NVCC),$(patsubst %/bin/nvcc,%/include,$(realpath $(NVCC))))
CUDA_LIB := $(if $(NVCC),$(firstword $(wildcard $(CUDA_INCLUDE:/include=/lib64) $(CUDA_INCLUDE:/include=/lib))))
# What neither the toolkit nor Debian's packages have, NVIDIA's Python wheels may: in .venv, or where python3 keeps its own.
SITE_PACKAGES = $(shell for python in $(PYTHON) python3; do $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done 2>/dev/null)
wheel_of = $(if $(call has_header,$(1),-I$(CUDA_INCLUDE)),,$(patsubst %/include/$(1),%,$(firstword $(wildcard $(addsuffix /nvidia/*/include/$(1),$(SITE_PACKAGES))))))
WHEELS := $(if $(NVCC),$(sort $(foreach header,cublasLt.h cudnn_version.h nccl.h,$(call wheel_of,$(header)))))
CUDA_INCLUDES := $(if $(NVCC),$(addprefix -I,$(CUDA_INCLUDE) $(addsuffix /include,$(WHEELS))))
CUDA ?= $(if $(NVCC),$(call has_header,cublasLt.h,$(CUDA_INCLUDES)))
CUDNN ?= $(if $(NVCC),$(call has_header,cudnn_version.h,$(CUDA_INCLUDES)))
NCCL ?= $(if $(NVCC),$(call has_header,nccl.h,$(CUDA_INCLUDES)))

ifeq ($(ONEDNN),1)
MATMUL := llmc/cpu/matmul_onednn.c
LDLIBS += -ldnnl
else
MATMUL := llmc/cpu/matmul_openmp.c
endif
ifeq ($(CJSON),1)
CFLAGS += -DHAVE_CJSON
LDLIBS += -lcjson
endif
ifeq ($(MPI),1)
CFLAGS += -DHAVE_MPI
MPI_CFLAGS := $(shell $(MPICC) --showme:compile)
LDLIBS += $(shell $(MPICC) --showme:link)
endif

NO_ONEDNN := no version 2 or 3 found: a loop of ours multiplies matrices instead, several times slower (apt-get install libdnnl-dev)
NO_CJSON := not found: no --resume, --init-from, --generate (apt-get install libcjson-dev)
# Code for each GPU that this toolkit knows and the program supports, and PTX for those to come. CUDA_ARCH=90a: for that one alone.
# f is for instructions of a whole family (CUDA 12.9 or later): code for 12.0 also runs on 12.1.
KNOWN_ARCHS := $(if $(NVCC),$(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
CUDA_ARCH ?= $(addsuffix a,$(filter 90,$(KNOWN_ARCHS))) $(addsuffix f,$(filter 100 103 120,$(KNOWN_ARCHS)))
CUDA_PTX := 90
GENCODE := $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
    $(foreach arch,$(CUDA_PTX),-gencode arch=compute_$(arch),code=compute_$(arch))
NVCCFLAGS := -std=c++17 -O3 -lineinfo $(GENCODE) -Werror all-warnings \
    -Xcompiler -Wall,-Wextra,-Werror,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics

ifeq ($(CUDA),1)
CFLAGS += -DHAVE_CUDA -DCUDA_MIN_CAPABILITY=$(shell printf '%s\n' $(subst f,,$(subst a,,$(CUDA_ARCH) $(CUDA_PTX))) | sort -n | head -n 1)
ifeq ($(CUDNN),1)
CFLAGS += -DHAVE_CUDNN
endif
ifeq ($(NCCL),1)
CFLAGS += -DHAVE_NCCL
endif
CUDA_LDLIBS += $(foreach lib,$(CUDA_LIB) $(addsuffix /lib,$(WHEELS)),-L$(lib) -Wl,-rpath,$(lib)) -lcudart_static -ldl -lrt -lpthread
CUBLASLT := $(or $(firstword $(wildcard $(addsuffix /libcublasLt.so*,$(CUDA_LIB) $(addsuffix /lib,$(WHEELS))))),-lcublasLt)
endif

NO_CUDA := $(if $(NVCC),$(if $(call has_header,cublasLt.h,$(CUDA_INCLUDES)),left out,no cuBLASLt found),no nvcc found): no training on GPUs (install the CUDA toolkit; CUDA_HOME=DIR says where it is)
NO_CUDNN := $(if $(filter 1,$(CUDA)),not found: attention on GPUs by kernels of ours$(COMMA) slower (install it: .venv/bin/pip install nvidia-cudnn-cu13),not needed without CUDA)
NO_NCCL := $(if $(filter 1,$(CUDA)),not found: no training on several GPUs (.venv/bin/pip install nvidia-nccl-cu13),not needed without CUDA)
NO_MPI := not found: no ranks on CPUs (apt-get install libopenmpi-dev openmpi-bin)
define FOUND
oneDNN  $(if $(filter 1,$(ONEDNN)),found: multiplies matrices,$(NO_ONEDNN))
cJSON   $(if $(filter 1,$(CJSON)),found: reads checkpoints,$(NO_CJSON))
CUDA    $(if $(filter 1,$(CUDA)),found: trains on GPUs of compute capability $(CUDA_ARCH) and later,$(NO_CUDA))
cuDNN   $(if $(filter 11,$(CUDA)$(CUDNN)),found: attention on GPUs,$(NO_CUDNN))
NCCL    $(if $(filter 11,$(CUDA)$(NCCL)),found: collectives between GPUs,$(NO_NCCL))
MPI     $(if $(filter 1,$(MPI)),found: collectives between ranks on CPUs,$(NO_MPI))
endef

# ---------------------------------------------------------------------------------------------------------------------
# Objects. A changed setting rebuilds them all.

# comm.c chooses between all Comms, NCCL's too, so that whatever has it needs the CUDA objects.
COMM_OBJECT := $(BUILD)/llmc/comm/comm.o
MODULES := $(filter-out llmc/cpu/matmul_%.c llmc/comm/comm.c llmc/comm/nccl%.c,$(wildcard llmc/*.c llmc/cpu/*.c llmc/comm/*.c))
OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(MODULES))
MATMUL_OBJECT := $(MATMUL:%.c=$(BUILD)/%.o)
TOOLS := $(patsubst dev/%.c,$(BUILD)/%,$(wildcard dev/*.c)) $(BUILD)/proxy
PROXY_OBJECTS := $(addprefix $(BUILD)/dev/proxy/,model.o data.o)
TESTS := $(patsubst dev/test/%.c,$(BUILD)/%,$(filter-out dev/test/test_cud%,$(wildcard dev/test/test_*.c))) $(patsubst %.cu,$(BUILD)/%,$(wildcard test_*.cu))
ifneq ($(NVCC),)
TESTS += $(BUILD)/test_mx_cuda $(BUILD)/test_hostcuda $(addprefix $(BUILD)/test_cuda_,ops quantize attention gpt)
ifeq ($(CUDA),1)
TESTS += $(addprefix $(BUILD)/,test_cuda_gemm test_cuda_device $(if $(CUDNN),test_cudnn_graphs) $(if $(filter 11,$(NCCL)$(MPI)),test_comm_nccl))
endif
endif
CUDA_KERNELS := $(wildcard llmc/cuda/*.cu)
CUDA_OBJECTS := $(patsubst %,$(BUILD)/%.o,$(basename $(CUDA_KERNELS) $(wildcard llmc/cuda/*.c llmc/comm/nccl*.c)))
SETTINGS := $(CC) $(CFLAGS) $(LDLIBS) $(NVCC) $(GENCODE)

programs: $(BUILD)/train_gpt_mxfp8 $(TOOLS)

all: programs
	@ln -sf $(BUILD)/train_gpt_mxfp8 train_gpt_mxfp8
	@$(MAKE) --no-print-directory found

# The libraries that are there, and what is missing without the others.
found:
	@echo "$$FOUND"
export FOUND

$(BUILD)/train_gpt_mxfp8: $(BUILD)/train_gpt_mxfp8.o $(OBJECTS) $(MATMUL_OBJECT) $(COMM_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS)

$(BUILD)/settings: FORCE
	@mkdir -p $(BUILD)
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

$(BUILD)/%.o: %.c $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) $(CFLAGS) -c $< -o $@

# The CUDA backend: kernels by nvcc, what only calls libraries by the C compiler.
$(BUILD)/llmc/cuda/%.o: llmc/cuda/%.cu $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  NVCC $<'
	$(Q)$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(BUILD)/llmc/cuda/%.o: llmc/cuda/%.c $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) $(CFLAGS) $(CUDA_INCLUDES) -c $< -o $@

$(addprefix $(BUILD)/llmc/comm/,nccl.o nccl_load.o): CFLAGS += $(CUDA_INCLUDES)
$(BUILD)/llmc/comm/mpi.o: CFLAGS += $(MPI_CFLAGS)

# The same kernels on the CPU, for tests: see dev/hostcuda/README.md. A GPU refuses misaligned accesses, and so do they.
ALIGNMENT := -fsanitize=alignment -fno-sanitize-recover=alignment
HOSTCUDA_FLAGS := -x c++ -std=c++17 -O2 -march=$(ARCH) -Wall -Wextra -Werror -Wno-unknown-pragmas -fno-exceptions -fopenmp \
    $(ALIGNMENT) -g -MMD -MP -DHOSTCUDA -include dev/hostcuda/hostcuda.h \
    $(CUDA_INCLUDES) $(EXTRA_CFLAGS)
HOSTCUDA_OBJECTS := $(CUDA_KERNELS:%.cu=$(BUILD)/hostcuda/%.o) \
    $(addprefix $(BUILD)/hostcuda/,dev/hostcuda/hostcuda.o dev/test/cuda_standins.o llmc/cuda/backend.o)
$(BUILD)/hostcuda/%.o: %.cu $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CXX  $<'
	$(Q)$(CXX) $(HOSTCUDA_FLAGS) -c $< -o $@

$(BUILD)/hostcuda/%.o: %.cpp $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CXX  $<'
	$(Q)$(CXX) $(HOSTCUDA_FLAGS) -c $< -o $@

$(BUILD)/hostcuda/%.o: %.c $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) $(filter-out -DHAVE_CUDNN,$(CFLAGS)) $(CUDA_INCLUDES) -c $< -o $@

# Host code in .cu files is C.
$(BUILD)/%.o: %.cu $(BUILD)/settings
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) -x c $(CFLAGS) -c $< -o $@

$(BUILD)/%: $(BUILD)/dev/%.o $(OBJECTS) $(MATMUL_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/proxy: $(BUILD)/dev/proxy/proxy.o $(PROXY_OBJECTS) $(OBJECTS) $(MATMUL_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS)

$(BUILD)/bench_%: $(BUILD)/dev/bench/bench_%.o $(OBJECTS) $(MATMUL_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS)

$(BUILD)/dev/bench/bench_ops.o: CFLAGS += $(CUDA_INCLUDES)

$(BUILD)/bench_comm: $(BUILD)/dev/bench/bench_comm.o $(OBJECTS) $(MATMUL_OBJECT) $(COMM_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS)

# On the CPU's shim: what has kernels. With the real libraries, without a GPU: what prepares their calls.
HOSTCUDA_TESTS := $(addprefix $(BUILD)/,test_cuda_ops test_cuda_quantize test_cuda_attention test_cuda_gpt)
$(filter-out %_gpt,$(HOSTCUDA_TESTS)): $(BUILD)/hostcuda/llmc/cuda/attention_choose.o
$(BUILD)/test_cuda_gpt: $(BUILD)/hostcuda/dev/test/cuda_attention_standin.o
$(HOSTCUDA_TESTS): $(BUILD)/%: $(BUILD)/hostcuda/dev/test/%.o $(HOSTCUDA_OBJECTS) $(OBJECTS) $(MATMUL_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(ALIGNMENT) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lcmocka

$(BUILD)/test_hostcuda: $(BUILD)/hostcuda/dev/test/test_hostcuda.o $(BUILD)/hostcuda/dev/hostcuda/hostcuda.o
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(ALIGNMENT) $(LDFLAGS) $^ -o $@ -lm -lcmocka

# It reads descriptors back, which the program doesn't.
$(BUILD)/test_cuda_gemm: CUDA_LDLIBS += $(CUBLASLT)
CUDA_TESTS := $(addprefix $(BUILD)/,test_cuda_gemm test_cuda_device test_cudnn_graphs)
$(CUDA_TESTS:$(BUILD)/%=$(BUILD)/dev/test/%.o): CFLAGS += $(CUDA_INCLUDES)
$(CUDA_TESTS): $(BUILD)/%: $(BUILD)/dev/test/%.o $(OBJECTS) $(MATMUL_OBJECT) $(CUDA_OBJECTS)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS) -lcmocka

$(BUILD)/test_proxy: $(BUILD)/dev/test/test_proxy.o $(PROXY_OBJECTS) $(OBJECTS) $(MATMUL_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) -lcmocka

# What runs on many ranks: with every Comm that the program has.
$(BUILD)/test_comm $(BUILD)/test_param: $(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(OBJECTS) $(MATMUL_OBJECT) $(COMM_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS) -lcmocka

# NCCL's Comm on the host's memory, NCCL being played by MPI.
$(BUILD)/dev/test/nccl_standin.o: CFLAGS += $(CUDA_INCLUDES) $(MPI_CFLAGS)
$(BUILD)/test_comm_nccl: $(addprefix $(BUILD)/,dev/test/test_comm.o dev/test/nccl_standin.o llmc/comm/nccl.o) $(OBJECTS) $(MATMUL_OBJECT) $(COMM_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) -lcmocka

# On a card: dev/gpu/check.sh.
GPU_TESTS := $(addprefix $(BUILD)/gpu_,test_cuda_ops test_cuda_quantize test_cuda_attention test_cuda_gpt test_cuda_gemm)
$(addprefix $(BUILD)/dev/test/,test_cuda_ops.o test_cuda_quantize.o test_cuda_attention.o test_cuda_gpt.o): CFLAGS += $(CUDA_INCLUDES)
$(GPU_TESTS): $(BUILD)/gpu_%: $(BUILD)/dev/test/%.o $(OBJECTS) $(MATMUL_OBJECT) $(CUDA_OBJECTS)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS) $(CUBLASLT) -lcmocka

gpu-tests: programs $(GPU_TESTS) $(BUILD)/test_gpt $(BUILD)/bench_ops

$(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(OBJECTS) $(MATMUL_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) -lcmocka

$(BUILD)/fuzz_%: $(BUILD)/dev/fuzz/fuzz_%.o $(OBJECTS) $(MATMUL_OBJECT) $(COMM_OBJECT)
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) -fsanitize=fuzzer $^ -o $@ $(LDLIBS)

$(BUILD)/test_gpt: $(BUILD)/test_gpt.o $(OBJECTS) $(MATMUL_OBJECT) $(if $(filter 1,$(CUDA)),$(CUDA_OBJECTS))
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) $(CUDA_LDLIBS) -lcmocka

# What multiplies, once more over our own matmul.
$(BUILD)/test_%_openmp: $(BUILD)/dev/test/test_%.o $(OBJECTS) $(BUILD)/llmc/cpu/matmul_openmp.o
	@echo '  LINK $@'
	$(Q)$(CC) -fopenmp $(LDFLAGS) $^ -o $@ $(LDLIBS) -lcmocka

# mx.h for the device, where nvcc is. A static runtime, so that the program starts wherever it is built.
$(BUILD)/test_mx_cuda: dev/test/test_mx_cuda.cu llmc/mx.h
	@mkdir -p $(@D)
	@echo '  NVCC $@'
	$(Q)$(NVCC) -std=c++17 -O2 $(GENCODE) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings $< -o $@ -lcmocka

# CUDA's own conversions, where its headers are, are a reference for ours.
$(BUILD)/dev/test/test_mx.o $(BUILD)/dev/test/test_mx_exhaustive.o: CFLAGS += $(CUDA_INCLUDES)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---------------------------------------------------------------------------------------------------------------------
# What people type

setup:
	@scripts/setup.sh

demo: setup
	@$(MAKE) --no-print-directory all
	@scripts/demo.sh

# COMPARE='--recipes all' and the like are options; the same again goes on where it was stopped.
compare: setup
	@$(MAKE) --no-print-directory all
	@$(PYTHON) data/demo_corpus.py --out-dir build/demo/data
	@$(PYTHON) scripts/compare_recipes.py --noise-seeds 4 --out-dir runs/compare $(COMPARE) -- \
	    --train-data 'build/demo/data/train_*.bin' --val-data 'build/demo/data/val_*.bin' --layers 4 --heads 4 --channels 256 \
	    --max-seq-len 128 --batch-size 8 --max-steps 1500 --learning-rate 1e-3 --warmup-steps 100 --val-steps 24 \
	    $(if $(THREADS),--threads $(THREADS))

# PROXY='all' and the like say which experiments; what has ended isn't run again.
proxy: setup
	@$(MAKE) --no-print-directory all
	@$(PYTHON) dev/proxy/run.py --proxy $(BUILD)/proxy --out-dir runs/proxy $(if $(THREADS),--option threads=$(THREADS)) \
	    $(or $(PROXY),reference)

law: setup
	@$(MAKE) --no-print-directory all
	@$(PYTHON) data/demo_corpus.py --out-dir build/demo/data
	@$(PYTHON) scripts/scaling_law.py --recipes bf16,mxfp8 --models 2x2x64,3x3x96,4x4x128,6x6x192 --tokens 0.5M,1M,2M,4M \
	    --out-dir runs/law $(LAW) -- --train-data 'build/demo/data/train_*.bin' --val-data 'build/demo/data/val_*.bin' \
	    --max-seq-len 128 --batch-size 8 --learning-rate 2e-3 --warmup-steps 50 --val-steps 50 \
	    $(if $(THREADS),--threads $(THREADS))

test: setup
	@$(MAKE) --no-print-directory all tests
	@$(PYTHON) data/demo_corpus.py --out-dir $(BUILD)/demo/data
	$(if $(NVCC),,@echo 'no nvcc was found: what is for GPUs is left out of these tests')
	@$(PYTHON) dev/test/run.py $(BUILD)

tests: $(TESTS) $(BUILD)/test_ops_openmp $(BUILD)/test_linear_openmp

test-exhaustive: setup
	@$(MAKE) --no-print-directory $(BUILD)/test_mx_exhaustive
	$(BUILD)/test_mx_exhaustive

# The tests once more, built in other ways, each in a directory of its own. Under a sanitizer they take several times as long.
SANITIZED := -O2 -g -fno-omit-frame-pointer
UNDEFINED := -fsanitize=undefined -fno-sanitize-recover=undefined
CLANG_SANITIZED := $(SANITIZED) -Wno-pass-failed # loops that clang doesn't vectorize are gcc's business
test_again = $(MAKE) --no-print-directory CUDA=0 BUILD=$(BUILD)/$(1) EXTRA_CFLAGS='$(2)' programs tests && \
    $(PYTHON) data/demo_corpus.py --out-dir $(BUILD)/demo/data && $(3) $(PYTHON) dev/test/run.py $(BUILD)/$(1)

test-asan: setup
	@$(call test_again,asan,$(SANITIZED) -fsanitize=address,SANITIZER=address TEST_SLOWNESS=5)

# With its checks between them gcc no longer sees that a function fills a variable.
test-ubsan: setup
	@$(call test_again,ubsan,$(SANITIZED) $(UNDEFINED) -Wno-maybe-uninitialized,TEST_SLOWNESS=5 UBSAN_OPTIONS=print_stacktrace=1)

# clang's OpenMP tells the sanitizer where threads fork and join (libarcher); gcc's doesn't, and neither does oneDNN.
TSAN_TESTS := test_ops test_linear test_quantize test_optimizer test_dataloader test_gpt
test-tsan: setup
	@scripts/setup.sh clang
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/tsan CC=clang ONEDNN=0 CUDA=0 EXTRA_CFLAGS='$(CLANG_SANITIZED) -fsanitize=thread' programs \
	    $(TSAN_TESTS:%=$(BUILD)/tsan/%)
	@$(PYTHON) dev/test/run_tsan.py $(BUILD)/tsan $(TSAN_TESTS)

test-aarch64: setup
	@scripts/test_aarch64.sh $(BUILD)/aarch64

coverage: setup
	@rm -rf $(BUILD)/coverage
	@$(call test_again,coverage,-O1 --coverage -fprofile-update=atomic,TEST_SLOWNESS=5)
	@$(PYTHON) dev/test/coverage.py $(BUILD)/coverage

FUZZ_SECONDS ?= 60
FUZZED := $(CLANG_SANITIZED) -fsanitize=fuzzer-no-link,address $(UNDEFINED)
FUZZERS := $(patsubst dev/fuzz/%.c,$(BUILD)/%,$(wildcard dev/fuzz/fuzz_*.c))
fuzz: setup
	@scripts/setup.sh clang
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/fuzz CC=clang ONEDNN=0 CUDA=0 EXTRA_CFLAGS='$(FUZZED)' fuzzers
	@dev/fuzz/run.sh $(BUILD)/fuzz $(FUZZ_SECONDS) $(FUZZ)

fuzzers: $(FUZZERS)

profile: setup
	@$(MAKE) --no-print-directory all
	@scripts/profile.sh $(PROFILE)

# Peers: LLMC_DIR, TORCH_PYTHON, MICROXCALING_DIR; see dev/bench/README.md. BENCH='--quick' and the like are options.
bench: setup
	@$(MAKE) --no-print-directory all $(BUILD)/bench_ops $(BUILD)/bench_comm
	@$(PYTHON) dev/bench/bench.py --build $(BUILD) $(BENCH)

# Suppressed where cppcheck doesn't follow a loop (a sum that can't be 0, an array that is filled) or takes workspace for text.
FORMATTED := $(wildcard *.cu dev/test/*.cu dev/hostcuda/*.h dev/hostcuda/*.cpp llmc/*.[ch] llmc/comm/*.[ch] llmc/cpu/*.[ch] llmc/cuda/*.[ch] llmc/cuda/*.cu llmc/cuda/*.cuh dev/*.[ch] dev/bench/*.[ch] dev/proxy/*.[ch] dev/fuzz/*.[ch] dev/test/*.[ch])
format:
	clang-format -i $(FORMATTED)

lint:
	clang-format --dry-run -Werror $(FORMATTED)
	cppcheck --quiet --error-exitcode=1 --enable=warning,performance,portability --inline-suppr --std=c11 \
	    --suppress=missingIncludeSystem --suppress=unknownMacro --suppress=invalidPointerCast:llmc/cpu/* \
	    --suppress=invalidFunctionArg:llmc/cpu/* --suppress=uninitvar:llmc/cpu/quantize.c \
	    -DHAVE_CJSON llmc dev/mxcast.c dev/dump_logits.c dev/proxy

clean:
	rm -rf $(BUILD) train_gpt_mxfp8

help:
	@sed -n '1,4s/^# //p' Makefile
	@echo 'make found            which libraries are there, and what is missing without the others'
	@echo 'make test-exhaustive  every FP32 value through every encoder, every amax through every scale rounding'
	@echo 'make bench            speed next to its limits and its peers; BENCH=--quick for less of it'
	@echo "make compare          recipes beside bf16 on Shakespeare, a report; COMPARE='--recipes all' and the like are options"
	@echo "make profile          where a step's time goes, a table and a picture; PROFILE='--recipe bf16' and the like are options"
	@echo 'make test-asan        every test under AddressSanitizer; test-ubsan: under UndefinedBehaviorSanitizer'
	@echo 'make test-tsan        what has threads, under ThreadSanitizer'
	@echo 'make test-aarch64     the numerics, cross-compiled for AArch64, under qemu'
	@echo 'make fuzz             hostile files and options, FUZZ_SECONDS=60 for each of seven readers; FUZZ=npy runs one'
	@echo "make proxy            what MX formats do to a small student of a teacher; PROXY=all: all of dev/proxy's experiments"
	@echo "make law              scaling laws of bf16 and mxfp8, fitted to 32 small runs; LAW='--bootstrap 500' and the like are options"
	@echo 'dev/gpu/check.sh      on a machine with a GPU: what only a GPU can show, in ten minutes'
	@echo 'make coverage         lines of llmc/ that no test reaches'
	@echo 'make format, lint     clang-format, cppcheck'
	@echo 'make clean            removes build/ (not runs/)'
	@echo 'make ONEDNN=0         leaves a library out; ARCH=x86-64-v3 builds for another processor; BUILD=DIR elsewhere,'
	@echo '                      and ./train_gpt_mxfp8 is a link to the program built last'

.PHONY: gpu-tests all programs found setup demo compare proxy law test tests test-asan test-ubsan test-tsan test-aarch64 coverage fuzz fuzzers test-exhaustive format lint profile bench clean help FORCE
.SECONDARY:
FORCE:
