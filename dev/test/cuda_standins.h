#pragma once

// The compute capability by which GEMMs take operands in their forms, 90 for 9.0. 0: of 10.0, but
// forms are those of native GEMMs only where these are demanded.
extern int cuda_standin_capability;
