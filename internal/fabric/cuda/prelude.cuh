// Collectives between the GPUs of one host. Each rank has scratch memory, which all ranks
// map: a sender writes into the receiver's scratch memory, and the receiver polls it.
//
// The compiler gets these macros:
//   CHORUS_TYPE, CHORUS_OP  the element type and the reduction of a reducing module;
//                           a module without them has the collectives that move bytes
//   CHORUS_RANKS            the number of ranks; a module without it serves any number
//
// Epochs: a kernel is one operation of one rank. All ranks issue the same operations in the
// same order, and an operation's number is its epoch. In each operation, every rank sends
// data to every other rank and receives data from it. When a rank completes epoch e + 1,
// all ranks have begun e + 1, so they have completed epoch e, and epoch e + 2 may overwrite
// the data of epoch e. Therefore two sets of buffers are enough, for even and odd epochs.
//
// Latency: a small operation takes the time of one transfer to another GPU, plus the
// dependent loads of the receiver. Therefore a thread issues all its loads before it uses
// the first value, and kernels have no further communication at their beginning or end.
//
// A block waits only for the block of the same index on the other ranks. Therefore the
// blocks of a grid need not be resident on the device at the same time.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Maxima: ranks of a group, threads of a block, blocks of a grid.
#define RANKS 8
#define THREADS 512
#define BLOCKS 128
