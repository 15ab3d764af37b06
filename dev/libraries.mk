# Which libraries are there. All but libc are optional; ONEDNN=0 and the like leave out one that is
# there. Sets FOUND_CFLAGS, FOUND_LDLIBS, GENCODE, and FOUND: the table that `make` prints.

has_header = $(shell printf '\043include <$(1)>\n' | $(CC) $(2) -E -x c - >/dev/null 2>&1 && echo 1)

# Nothing is known of oneDNN's interface in versions other than 2 and 3.
ONEDNN ?= $(shell printf '\043include <oneapi/dnnl/dnnl_version.h>\n\043if DNNL_VERSION_MAJOR < 2 || DNNL_VERSION_MAJOR > 3\n\043error\n\043endif\n' | \
    $(CC) -E -x c - >/dev/null 2>&1 && echo 1)
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

# CUDA: the toolkit, and beside it cuDNN and NCCL. What neither the toolkit nor Debian's packages
# have, NVIDIA's Python wheels may: in .venv, or where python3 keeps its own.
NVCC := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc) $(CUDA_PATH:%=%/bin/nvcc)) \
    $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc) \
    $(lastword $(sort $(wildcard /usr/local/cuda-*/bin/nvcc))))
CUDA_INCLUDE := $(if $(NVCC),$(patsubst %/bin/nvcc,%/include,$(realpath $(NVCC))))
CUDA_LIB := $(if $(NVCC),$(firstword $(wildcard $(CUDA_INCLUDE:/include=/lib64) $(CUDA_INCLUDE:/include=/lib))))
SITE_PACKAGES = $(shell for python in $(PYTHON) python3; do \
    $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done 2>/dev/null)
wheel_of = $(if $(call has_header,$(1),-I$(CUDA_INCLUDE)),,$(patsubst %/include/$(1),%,\
    $(firstword $(wildcard $(addsuffix /nvidia/*/include/$(1),$(SITE_PACKAGES))))))
WHEELS := $(if $(NVCC),$(sort $(foreach header,cublasLt.h cudnn_version.h nccl.h,$(call wheel_of,$(header)))))
CUDA_INCLUDES := $(if $(NVCC),$(addprefix -I,$(CUDA_INCLUDE) $(addsuffix /include,$(WHEELS))))
CUDA ?= $(if $(NVCC),$(call has_header,cublasLt.h,$(CUDA_INCLUDES)))
CUDNN ?= $(if $(NVCC),$(call has_header,cudnn_version.h,$(CUDA_INCLUDES)))
NCCL ?= $(if $(NVCC),$(call has_header,nccl.h,$(CUDA_INCLUDES)))

# Code for each GPU that this toolkit knows and the program supports, and PTX for those to come.
# CUDA_ARCH=90a: for that one alone. f is for instructions of a whole family (CUDA 12.9 or later):
# code for 12.0 also runs on 12.1.
KNOWN_ARCHS := $(if $(NVCC),$(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
CUDA_ARCH ?= $(addsuffix a,$(filter 90,$(KNOWN_ARCHS))) $(addsuffix f,$(filter 100 103 120,$(KNOWN_ARCHS)))
CUDA_PTX := 90
GENCODE := $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
    $(foreach arch,$(CUDA_PTX),-gencode arch=compute_$(arch),code=compute_$(arch))

ifeq ($(CUDA),1)
OLDEST_ARCH := $(shell printf '%s\n' $(subst f,,$(subst a,,$(CUDA_ARCH) $(CUDA_PTX))) | sort -n | head -n 1)
FOUND_CFLAGS += -DHAVE_CUDA -DCUDA_MIN_CAPABILITY=$(OLDEST_ARCH) $(CUDA_INCLUDES)
FOUND_CFLAGS += $(if $(filter 1,$(CUDNN)),-DHAVE_CUDNN) $(if $(filter 1,$(NCCL)),-DHAVE_NCCL)
FOUND_LDLIBS += $(foreach lib,$(CUDA_LIB) $(addsuffix /lib,$(WHEELS)),-L$(lib) -Wl,-rpath,$(lib)) \
    -lcudart_static -ldl -lrt -lpthread
CUBLASLT := $(or $(firstword $(wildcard $(addsuffix /libcublasLt.so*,$(CUDA_LIB) $(addsuffix /lib,$(WHEELS))))),-lcublasLt)
endif

COMMA := ,
NO_ONEDNN := no version 2 or 3 found: GEMMs in FP32$(COMMA) half as fast where the processor has BF16 instructions (apt-get install libdnnl-dev)
NO_CJSON := not found: no --resume, --init-from, --generate, --config (apt-get install libcjson-dev)
NO_TOOLKIT := no training on GPUs (install the CUDA toolkit; CUDA_HOME=DIR says where it is)
NO_CUDA := $(if $(NVCC),$(if $(call has_header,cublasLt.h,$(CUDA_INCLUDES)),left out by CUDA=$(CUDA): no training on GPUs,\
    no cuBLASLt found: $(NO_TOOLKIT)),no nvcc found: $(NO_TOOLKIT))
NO_CUDNN := not found: attention on GPUs by kernels of ours$(COMMA) slower (install it: .venv/bin/pip install nvidia-cudnn-cu13)
NO_NCCL := not found: no training on several GPUs (.venv/bin/pip install nvidia-nccl-cu13)
NO_MPI := not found: no ranks on CPUs (apt-get install libopenmpi-dev openmpi-bin)
needs_cuda = $(if $(filter 1,$(CUDA)),$(1),not needed without CUDA)
define FOUND
oneDNN  $(if $(filter 1,$(ONEDNN)),found: multiplies where the processor has BF16 instructions,$(NO_ONEDNN))
cJSON   $(if $(filter 1,$(CJSON)),found: reads checkpoints,$(NO_CJSON))
CUDA    $(if $(filter 1,$(CUDA)),found: trains on GPUs of compute capability $(CUDA_ARCH) and later,$(NO_CUDA))
cuDNN   $(if $(filter 11,$(CUDA)$(CUDNN)),found: attention on GPUs,$(call needs_cuda,$(NO_CUDNN)))
NCCL    $(if $(filter 11,$(CUDA)$(NCCL)),found: collectives between GPUs,$(call needs_cuda,$(NO_NCCL)))
MPI     $(if $(filter 1,$(MPI)),found: collectives between ranks on CPUs,$(NO_MPI))
endef
