// Collectives between the GPUs of one host, over scratch memory that all of them
// have mapped. CHORUS_TYPE and CHORUS_OP, macros given to the compiler, say which
// elements the module reduces and how; without them it is the module of the
// collectives that only move bytes. CHORUS_RANKS, if it is given, is the number of ranks.
//
// Every kernel is one operation of one rank, in the order in which all ranks have
// them: its epoch. Whatever an operation is, each rank sends something to each other
// one and waits for something of each. So a rank that has begun epoch e + 1 knows, when
// that is over, that all have ended epoch e, and two copies of the scratch memory, used
// in turn, are enough.
//
// What takes time is a word's way to another GPU and, once it is there, each load of a
// thread that waits for the one before. So threads ask for all that they need before
// they use the first of it, and nothing but the words themselves lies between the
// beginning of a kernel and its end. A block waits for nothing but the same block of the
// other ranks, so that not all of them must have room on a device at once.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define RANKS 8
#define THREADS 512 // at most, as the rest
#define BLOCKS 128
