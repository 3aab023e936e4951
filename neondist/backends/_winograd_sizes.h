/* The kernels and element types for which _winograd_typed.h is included, with vectors of one length. */

#define T float
#define KERNEL 3
#define NAME(x) NAMED(x, float3)
#include "_winograd_typed.h"
#include "_depthwise_typed.h"
#undef KERNEL
#undef NAME
#define KERNEL 5
#define NAME(x) NAMED(x, float5)
#include "_winograd_typed.h"
#undef T
#undef NAME
#define T double
#define NAME(x) NAMED(x, double5)
#include "_winograd_typed.h"
#undef KERNEL
#undef NAME
#define KERNEL 3
#define NAME(x) NAMED(x, double3)
#include "_winograd_typed.h"
#include "_depthwise_typed.h"
#undef T
#undef KERNEL
#undef NAME
