# Which libraries are there. All but libc are optional; ONEDNN=0 and the like leave out one that is
# there. Sets FOUND_CFLAGS, FOUND_LDLIBS, GENCODE, and FOUND: the table that `make` prints.

# Is 1 where, with the options $(2), there is a header $(1), and where the condition $(3) holds of
# what it defines, if there is a condition.
has_header = $(shell printf '\043include <$(1)>\n\043if !($(or $(3),1))\n\043error\n\043endif\n' | \
    $(CC) $(2) -E -x c - >/dev/null 2>&1 && echo 1)

# Nothing is known of oneDNN's interface in versions other than 2 and 3.
ONEDNN ?= $(call has_header,oneapi/dnnl/dnnl_version.h,,DNNL_VERSION_MAJOR == 2 || DNNL_VERSION_MAJOR == 3)
CJSON ?= $(call has_header,cjson/cJSON.h)
CMOCKA := $(call has_header,cmocka.h,-include stdarg.h -include stddef.h -include setjmp.h -include stdint.h)
MPICC := $(shell command -v mpicc)
MPI ?= $(if $(MPICC),$(if $(shell $(MPICC) --showme:link 2>/dev/null),1))

ifeq ($(ONEDNN),1)
FOUND_CFLAGS += -DHAVE_ONEDNN
FOUND_LDLIBS += -ldnnl
endif
ifeq ($(CJSON),1)
FOUND_CFLAGS += -DHAVE_CJSON
FOUND_LDLIBS += -lcjson
endif
ifeq ($(MPI),1)
FOUND_CFLAGS += -DHAVE_MPI
MPI_CFLAGS := $(shell $(MPICC) --showme:compile)
FOUND_LDLIBS += $(shell $(MPICC) --showme:link)
endif

# CUDA: the toolkit, from 12.4 on, and beside it cuDNN and NCCL. What neither the toolkit nor
# Debian's packages have, or have in too old a version, NVIDIA's Python wheels may: in .venv, or
# where python3 keeps its own.
NVCC := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc) $(CUDA_PATH:%=%/bin/nvcc)) \
    $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc) \
    $(lastword $(sort $(wildcard /usr/local/cuda-*/bin/nvcc))))
CUDA_RELEASE := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p'))
TOO_OLD := $(filter 8.% 9.% 10.% 11.% 12.0 12.1 12.2 12.3,$(CUDA_RELEASE))
CUDA_INCLUDE := $(if $(NVCC),$(patsubst %/bin/nvcc,%/include,$(realpath $(NVCC))))
CUDA_LIB := $(if $(NVCC),$(firstword $(wildcard $(CUDA_INCLUDE:/include=/lib64) $(CUDA_INCLUDE:/include=/lib))))
SITE_PACKAGES = $(shell for python in $(PYTHON) python3; do \
    $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done 2>/dev/null)
wheel_of = $(if $(NVCC),$(if $(call has_header,$(1),-I$(CUDA_INCLUDE),$(2)),,$(patsubst %/include/$(1),%,\
    $(firstword $(wildcard $(addsuffix /nvidia/*/include/$(1),$(SITE_PACKAGES)))))))
# Attention of cuDNN before 9.10.2 isn't used (llmc/cuda/attention_cudnn.c says why). cuBLASLt has
# block-scaled FP8 and FP4 from 12.8 on and multiplies FP8 right from 12.8.4 on, and has FP8 by blocks
# of 128 from 12.9 on (llmc/cuda/gemm_path.c).
GOOD_CUDNN := CUDNN_VERSION >= 91002
GOOD_CUBLAS := CUBLAS_VERSION >= 120804
BLOCK128_CUBLAS := CUBLAS_VERSION >= 120900
# These two lie before a toolkit that has older ones. cuBLASLt's may bring a whole toolkit's headers.
WHEELS := $(sort $(call wheel_of,cudnn_version.h,$(GOOD_CUDNN)) $(call wheel_of,nccl.h))
CUBLAS_WHEEL := $(call wheel_of,cublasLt.h)
CUDA_INCLUDES := $(if $(NVCC),$(addprefix -I,$(WHEELS:=/include) $(CUDA_INCLUDE) $(CUBLAS_WHEEL:=/include)))
CUDA_LIBS := $(WHEELS:=/lib) $(CUDA_LIB) $(CUBLAS_WHEEL:=/lib)
CUDA ?= $(if $(NVCC),$(if $(TOO_OLD),,$(call has_header,cublasLt.h,$(CUDA_INCLUDES))))
CUDNN ?= $(if $(NVCC),$(call has_header,cudnn_version.h,$(CUDA_INCLUDES),$(GOOD_CUDNN)))
NCCL ?= $(if $(NVCC),$(call has_header,nccl.h,$(CUDA_INCLUDES)))
NATIVE_MXFP8 := $(if $(NVCC),$(call has_header,cublasLt.h,$(CUDA_INCLUDES),$(GOOD_CUBLAS)))
NATIVE_BLOCK128 := $(if $(NVCC),$(call has_header,cublasLt.h,$(CUDA_INCLUDES),$(BLOCK128_CUBLAS)))

# Code for the cards that are in this machine, if there are any and all are known, else for each that
# this toolkit knows and the program supports; and PTX for those to come. CUDA_ARCH=90 is for that
# one alone, CUDA_ARCH=all for each. f is for instructions of a whole family: code for 10.0 also runs
# on 10.3, that for 12.0 on 12.1. CUDA 12.8 has them for one card alone, a, and before it there is no
# Blackwell. PTX for 9.0 comes from the same pass of the compiler as code for 9.0, whose own
# instructions, a, nothing here uses.
KNOWN_ARCHS := $(if $(NVCC),$(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
BLACKWELLS := $(addsuffix $(if $(filter 12.8,$(CUDA_RELEASE)),a,f),$(filter 100 120,$(KNOWN_ARCHS)))
ALL_ARCHS := $(strip $(filter 89 90,$(KNOWN_ARCHS)) $(BLACKWELLS))
FAMILY_OF_103 := 100f
FAMILY_OF_121 := 120f
ifeq ($(origin CUDA_ARCH),undefined)
CARDS := $(if $(NVCC),$(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
    | grep -x '[0-9]*\.[0-9]*'))))
CUDA_ARCH := $(or $(sort $(foreach card,$(CARDS),$(or $(filter $(card) $(card)a $(card)f $(FAMILY_OF_$(card)),$(ALL_ARCHS)),all))),all)
endif
ARCHS := $(if $(filter all,$(CUDA_ARCH)),$(ALL_ARCHS),$(CUDA_ARCH))
CUDA_PTX := 90
GENCODE := $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
    $(foreach arch,$(CUDA_PTX),-gencode arch=compute_$(arch),code=compute_$(arch))

ifeq ($(CUDA),1)
OLDEST_ARCH := $(shell printf '%s\n' $(subst f,,$(subst a,,$(ARCHS) $(CUDA_PTX))) | sort -n | head -n 1)
FOUND_CFLAGS += -DHAVE_CUDA -DCUDA_MIN_CAPABILITY=$(OLDEST_ARCH) $(CUDA_INCLUDES)
FOUND_CFLAGS += $(if $(filter 1,$(CUDNN)),-DHAVE_CUDNN) $(if $(filter 1,$(NCCL)),-DHAVE_NCCL)
FOUND_CFLAGS += $(if $(NATIVE_MXFP8),,-DNO_NATIVE_MXFP8) $(if $(NATIVE_BLOCK128),,-DNO_NATIVE_BLOCK128)
FOUND_LDLIBS += $(foreach lib,$(CUDA_LIBS),-L$(lib) -Wl,-rpath,$(lib)) -lcudart_static -ldl -lrt -lpthread
CUBLASLT := $(or $(firstword $(wildcard $(CUDA_LIBS:=/libcublasLt.so*))),-lcublasLt)
endif

COMMA := ,
NO_ONEDNN := no version 2 or 3 found: GEMMs by loops of our own$(COMMA) slower where the processor has AVX-512 (apt-get install libdnnl-dev)
NO_CJSON := not found: no --resume, --init-from, --generate, --config (apt-get install libcjson-dev)
NO_TOOLKIT := no training on GPUs (install the CUDA toolkit; CUDA_HOME=DIR says where it is)
WHY_NO_CUDA := $(if $(NVCC),$(if $(TOO_OLD),CUDA $(CUDA_RELEASE) is older than 12.4,$(if \
    $(call has_header,cublasLt.h,$(CUDA_INCLUDES)),,no cuBLASLt found)),no nvcc found)
NO_CUDA := $(if $(WHY_NO_CUDA),$(WHY_NO_CUDA): $(NO_TOOLKIT),left out by CUDA=$(CUDA): no training on GPUs)
# Wheels are of a toolkit's major version.
CUDA_MAJOR := $(or $(firstword $(subst ., ,$(CUDA_RELEASE))),13)
CUDA_LACKS := $(if $(BLACKWELLS),,; not on Blackwell (nvcc knows it from 12.8 on))$(if $(NATIVE_MXFP8),,; \
    no native MXFP8 or NVFP4 (cuBLAS has them from 12.8.4 on))$(if $(NATIVE_BLOCK128),,; \
    no native FP8 by blocks of 128 (cuBLAS has it from 12.9 on))
WHY_NO_CUDNN := $(if $(call has_header,cudnn_version.h,$(CUDA_INCLUDES)),older than 9.10.2,not found)
NO_CUDNN := $(WHY_NO_CUDNN): attention on GPUs by kernels of ours$(COMMA) slower (install it: .venv/bin/pip install nvidia-cudnn-cu$(CUDA_MAJOR))
NO_NCCL := not found: no training on several GPUs (.venv/bin/pip install nvidia-nccl-cu$(CUDA_MAJOR))
NO_MPI := not found: no ranks on CPUs (apt-get install libopenmpi-dev openmpi-bin)
needs_cuda = $(if $(filter 1,$(CUDA)),$(1),not needed without CUDA)
define FOUND
oneDNN  $(if $(filter 1,$(ONEDNN)),found: multiplies where the processor has BF16 instructions,$(NO_ONEDNN))
cJSON   $(if $(filter 1,$(CJSON)),found: reads checkpoints,$(NO_CJSON))
CUDA    $(if $(filter 1,$(CUDA)),found: trains on GPUs of compute capability $(ARCHS) and later$(CUDA_LACKS),$(NO_CUDA))
cuDNN   $(if $(filter 11,$(CUDA)$(CUDNN)),found: attention on GPUs,$(call needs_cuda,$(NO_CUDNN)))
NCCL    $(if $(filter 11,$(CUDA)$(NCCL)),found: collectives between GPUs,$(call needs_cuda,$(NO_NCCL)))
MPI     $(if $(filter 1,$(MPI)),found: collectives between ranks on CPUs,$(NO_MPI))
endef
