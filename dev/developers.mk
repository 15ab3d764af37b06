# What developers run beside `make test`: other builds of the tests, fuzzing, benchmarks, lint.

# Tests in C: each dev/test/test_NAME.c is a program over the library; those of the CUDA side need
# the toolkit.
TESTS := $(patsubst dev/test/%.c,$(BUILD)/%,$(filter-out dev/test/test_cud% dev/test/test_comm_nccl.c,$(wildcard dev/test/test_*.c))) \
    $(BUILD)/test_gpt
ifneq ($(NVCC),)
TESTS += $(addprefix $(BUILD)/,test_mx_cuda test_hostcuda test_cuda_rounding test_cuda_ops test_cuda_quantize test_cuda_attention test_cuda_gpt test_cuda_bench test_cuda_authors)
ifeq ($(CUDA),1)
TESTS += $(addprefix $(BUILD)/,$(if $(NATIVE_BLOCK128),test_cuda_gemm) test_cuda_device $(if $(filter 1,$(CUDNN)),test_cudnn_graphs) \
    $(if $(filter 11,$(NCCL)$(MPI)),test_comm_nccl))
endif
endif
tests: $(TESTS)

$(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(LIBRARY)
	$(LINK) -lcmocka

$(BUILD)/test_gpt: $(BUILD)/test_gpt.o $(LIBRARY)
	$(LINK) -lcmocka

$(BUILD)/test_proxy: $(addprefix $(BUILD)/dev/,test/test_proxy.o proxy/model.o proxy/data.o) $(LIBRARY)
	$(LINK) -lcmocka

# NCCL's Comm on the host's memory, NCCL being played by MPI. The stand-in finds its own functions.
$(BUILD)/test_comm_nccl: LDFLAGS += -rdynamic
$(BUILD)/dev/test/nccl_standin.o: CFLAGS += $(MPI_CFLAGS)
$(BUILD)/test_comm_nccl: $(addprefix $(BUILD)/,dev/test/test_comm.o dev/test/nccl_standin.o) $(LIBRARY)
	$(LINK) -lcmocka

# The GEMM on the host's memory, cuBLASLt's multiplication being played. The stand-in reads descriptors
# back, which the program doesn't.
$(BUILD)/test_cuda_gemm: LDLIBS += $(CUBLASLT)
$(BUILD)/test_cuda_gemm: $(addprefix $(BUILD)/dev/test/,test_cuda_gemm.o cublaslt_standin.o) $(LIBRARY)
	$(LINK) -lcmocka

# mx.h for the device. CUDA's own conversions, where its headers are, are a reference for ours.
$(BUILD)/test_mx_cuda: dev/test/test_mx_cuda.cu llmc/numerics/mx.h
	@mkdir -p $(@D)
	@echo '  NVCC $@'
	$(Q)$(NVCC) -std=c++17 -O2 $(GENCODE) -I. -Xcompiler -Wall,-Wextra $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror) $< -o $@ -lcmocka
$(BUILD)/dev/test/test_mx.o $(BUILD)/dev/test/test_mx_exhaustive.o: CFLAGS += $(CUDA_INCLUDES)

# The kernels on the CPU: see dev/hostcuda/README.md. A GPU refuses misaligned accesses, and so do
# they. What calls cuBLASLt and cuDNN is played by stand-ins.
ALIGNMENT := -fsanitize=alignment -fno-sanitize-recover=alignment
HOSTCUDA_FLAGS := -x c++ -std=c++17 -O2 -march=$(ARCH) -Wall -Wextra $(if $(WERROR),-Werror) -Wno-unknown-pragmas \
    -fno-exceptions -fopenmp $(ALIGNMENT) -g -MMD -MP -I. -DHOSTCUDA -include dev/hostcuda/hostcuda.h \
    $(CUDA_INCLUDES) $(EXTRA_CFLAGS)
HOSTCUDA_OBJECTS := $(patsubst %.cu,$(BUILD)/hostcuda/%.o,$(wildcard llmc/cuda/*.cu)) \
    $(addprefix $(BUILD)/hostcuda/,dev/hostcuda/hostcuda.o dev/test/cuda_standins.o llmc/cuda/backend.o llmc/cuda/stream.o)
HOSTCUDA_TESTS := $(addprefix $(BUILD)/,test_cuda_rounding test_cuda_ops test_cuda_quantize test_cuda_attention test_cuda_gpt test_cuda_bench test_cuda_authors)

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

$(filter-out %_gpt %_bench %_authors,$(HOSTCUDA_TESTS)): $(BUILD)/hostcuda/llmc/cuda/attention_choose.o
$(BUILD)/test_cuda_gpt $(BUILD)/test_cuda_bench $(BUILD)/test_cuda_authors: $(BUILD)/hostcuda/dev/test/cuda_attention_standin.o
$(BUILD)/test_cuda_authors: $(addprefix $(BUILD)/,hostcuda/dev/proxy/authors_cuda.o dev/proxy/authors.o dev/proxy/model.o)
$(HOSTCUDA_TESTS): LDFLAGS += $(ALIGNMENT)
$(HOSTCUDA_TESTS): $(BUILD)/%: $(BUILD)/hostcuda/dev/test/%.o $(HOSTCUDA_OBJECTS) $(LIBRARY)
	$(LINK) -lcmocka

$(BUILD)/test_hostcuda: LDFLAGS += $(ALIGNMENT)
$(BUILD)/test_hostcuda: $(addprefix $(BUILD)/hostcuda/dev/,test/test_hostcuda.o hostcuda/hostcuda.o)
	$(LINK) -lcmocka

# On a card: dev/gpu/check.sh.
GPU_TESTS := $(addprefix $(BUILD)/gpu_,test_cuda_ops test_cuda_quantize test_cuda_attention test_cuda_gpt test_cuda_authors)
$(BUILD)/dev/test/test_cuda_%.o: CFLAGS += $(CUDA_INCLUDES)
$(BUILD)/gpu_test_cuda_authors: $(addprefix $(BUILD)/dev/proxy/,authors_cuda.o authors.o model.o)
$(GPU_TESTS): $(BUILD)/gpu_%: $(BUILD)/dev/test/%.o $(LIBRARY)
	$(LINK) -lcmocka

$(BUILD)/gpu_test_cuda_gemm: $(BUILD)/dev/test/gpu_test_cuda_gemm.o $(LIBRARY)
	$(LINK) -lcmocka

gpu-tests: $(PROGRAMS) $(GPU_TESTS) $(BUILD)/gpu_test_cuda_gemm $(BUILD)/test_gpt $(BUILD)/bench_ops

test-exhaustive: setup
	@$(MAKE) --no-print-directory $(BUILD)/test_mx_exhaustive
	$(BUILD)/test_mx_exhaustive

# ------------------------------------------------------------------------------------------------
# The tests once more, built in other ways, each in a directory of its own. Under a sanitizer they
# take several times as long.

SANITIZED := -O2 -g -fno-omit-frame-pointer
UNDEFINED := -fsanitize=undefined -fno-sanitize-recover=undefined
CLANG_SANITIZED := $(SANITIZED) -Wno-pass-failed # loops that clang doesn't vectorize are gcc's business
test_again = $(MAKE) --no-print-directory CUDA=0 BUILD=$(BUILD)/$(1) EXTRA_CFLAGS='$(2)' programs tests && \
    $(PYTHON) data/demo_corpus.py --out-dir $(BUILD)/demo/data && $(3) $(PYTHON) dev/test/run.py $(BUILD)/$(1)

# Unlike `all`, leaves the link ./train_gpt_mxfp8 as it is.
programs: $(PROGRAMS)

test-asan: setup
	@$(call test_again,asan,$(SANITIZED) -fsanitize=address,SANITIZER=address TEST_SLOWNESS=5)

# With its checks between them gcc no longer sees that a function fills a variable.
test-ubsan: setup
	@$(call test_again,ubsan,$(SANITIZED) $(UNDEFINED) -Wno-maybe-uninitialized,TEST_SLOWNESS=5 UBSAN_OPTIONS=print_stacktrace=1)

# clang's OpenMP tells the sanitizer where threads fork and join (libarcher); gcc's doesn't, and
# neither does oneDNN.
TSAN_TESTS := test_ops test_linear test_quantize test_optimizer test_dataloader test_gpt
test-tsan: setup
	@scripts/setup.sh clang
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/tsan CC=clang ONEDNN=0 CUDA=0 \
	    EXTRA_CFLAGS='$(CLANG_SANITIZED) -fsanitize=thread' programs $(TSAN_TESTS:%=$(BUILD)/tsan/%)
	@$(PYTHON) dev/test/run_tsan.py $(BUILD)/tsan $(TSAN_TESTS)

test-aarch64: setup
	@scripts/test_aarch64.sh $(BUILD)/aarch64

# What an AArch64 host of a GPU (Grace, with an H100, a B200 or a B300) compiles: the program without
# oneDNN, cJSON and MPI, kernels too, with this machine's headers of CUDA, to objects. To link them
# takes libraries for AArch64.
OBJECTS := $(addprefix $(BUILD)/,$(addsuffix .o,$(basename $(SOURCES))) train_gpt_mxfp8.o)
objects: $(OBJECTS)
	@echo '$(words $(OBJECTS)) objects, $(if $(filter 1,$(CUDA)),kernels among them,without CUDA)'

objects-aarch64:
	@scripts/setup.sh aarch64
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/aarch64-objects CC=aarch64-linux-gnu-gcc ARCH=generic ONEDNN=0 CJSON=0 MPI=0 \
	    CUDA_ARCH='$(filter 90 100%,$(ALL_ARCHS))' EXTRA_NVCCFLAGS='-ccbin aarch64-linux-gnu-g++ $(CUDA_INCLUDES)' objects

coverage: setup
	@rm -rf $(BUILD)/coverage
	@$(call test_again,coverage,-O1 --coverage -fprofile-update=atomic,TEST_SLOWNESS=5)
	@$(PYTHON) dev/test/coverage.py $(BUILD)/coverage

FUZZ_SECONDS ?= 60
FUZZED := $(CLANG_SANITIZED) -fsanitize=fuzzer-no-link,address $(UNDEFINED)
FUZZERS := $(patsubst dev/fuzz/%.c,$(BUILD)/%,$(wildcard dev/fuzz/fuzz_*.c))
$(FUZZERS): $(BUILD)/fuzz_%: $(BUILD)/dev/fuzz/fuzz_%.o $(LIBRARY)
	$(LINK) -fsanitize=fuzzer

fuzzers: $(FUZZERS)

fuzz: setup
	@scripts/setup.sh clang
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/fuzz CC=clang ONEDNN=0 CUDA=0 EXTRA_CFLAGS='$(FUZZED)' fuzzers
	@dev/fuzz/run.sh $(BUILD)/fuzz $(FUZZ_SECONDS) $(FUZZ)

# ------------------------------------------------------------------------------------------------
# Speed

BENCHMARKS := $(addprefix $(BUILD)/,bench_ops bench_comm)
$(BUILD)/bench_%: $(BUILD)/dev/bench/bench_%.o $(LIBRARY)
	$(LINK)

# Peers: LLMC_DIR, TORCH_PYTHON, MICROXCALING_DIR; see dev/bench/README.md. BENCH='--quick' and the
# like are options.
bench: setup
	@$(MAKE) --no-print-directory all $(BENCHMARKS) $(FOR_HERE)
	@$(PYTHON) dev/bench/bench.py --build $(BUILD) $(BENCH)

profile: setup
	@$(MAKE) --no-print-directory all $(FOR_HERE)
	@scripts/profile.sh $(PROFILE)

# ------------------------------------------------------------------------------------------------
# Form

FORMATTED = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' ':!dev/test/fixtures')
format:
	clang-format -i $(FORMATTED)

# Suppressed where cppcheck doesn't follow a loop (a sum that can't be 0, rows that are all filled), a
# call that doesn't return, or a condition, and where it takes workspace and scales for text. gcc and
# the sanitizers look for what isn't initialized.
lint:
	clang-format --dry-run -Werror $(FORMATTED)
	cppcheck --quiet --error-exitcode=1 --enable=warning,performance,portability --inline-suppr --std=c11 -I. \
	    --suppress=missingIncludeSystem --suppress=unknownMacro --suppress=invalidPointerCast \
	    --suppress=invalidFunctionArg --suppress=uninitvar --suppress=ctuuninitvar --suppress=ctunullpointer \
	    --suppress=nullPointerArithmeticRedundantCheck \
	    -DHAVE_CJSON llmc dev/mxcast.c dev/dump_logits.c dev/proxy

help:
	@sed -n '1,4s/^# //p' Makefile
	@echo 'make setup            installs what is missing and makes .venv, for scripts/ and data/, and no more'
	@echo 'make found            which libraries are there, and what is missing without the others'
	@echo 'make test-exhaustive  every FP32 value through every encoder, every amax through every scale rounding'
	@echo 'make bench            speed next to its limits and its peers; BENCH=--quick for less of it'
	@echo "make compare          recipes beside bf16 on Shakespeare, under eight seeds; COMPARE='--plan' says how long that takes"
	@echo "make profile          where a step's time goes, a table and a picture; PROFILE='--recipe bf16' and the like are options"
	@echo 'make test-asan        every test under AddressSanitizer; test-ubsan: under UndefinedBehaviorSanitizer'
	@echo 'make test-tsan        what has threads, under ThreadSanitizer'
	@echo 'make test-aarch64     the numerics, cross-compiled for AArch64, under qemu'
	@echo 'make objects-aarch64  the program, kernels too, cross-compiled for AArch64 (Grace), to objects'
	@echo 'make fuzz             hostile files and options, FUZZ_SECONDS=60 for each of eight readers; FUZZ=npy runs one'
	@echo "make proxy            what MX formats do to a small student of a teacher; PROXY=all: all of dev/proxy's experiments"
	@echo "make law              scaling laws of bf16 and mxfp8, fitted to 32 small runs; LAW='--seeds 3' and the like are options"
	@echo 'dev/gpu/check.sh      on a machine with a GPU: what only a GPU can show, with a verdict, in 10, 30 or 60 minutes'
	@echo 'make coverage         lines of llmc/ that no test reaches'
	@echo 'make format, lint     clang-format, cppcheck'
	@echo 'make clean            removes what was built (no data sets in build/, no runs/)'
	@echo 'make ONEDNN=0         leaves a library out; ARCH=x86-64-v3 builds for another processor; BUILD=DIR elsewhere,'
	@echo '                      and ./train_gpt_mxfp8 is a link to the program built last'

.PHONY: tests programs gpu-tests test-exhaustive test-asan test-ubsan test-tsan test-aarch64 objects objects-aarch64 \
    coverage fuzz fuzzers \
    bench profile format lint help
