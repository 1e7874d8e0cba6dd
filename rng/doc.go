// Package rng implements torch's random numbers, bit for bit: its CUDA generator and the
// fills that draw from it.
//
//	g := rng.Default(dev) // torch.cuda.default_generators[i]
//	g.ManualSeed(42)
//	x, err := memory.Make[float32](s, 1<<20)
//	if err != nil {
//		return err
//	}
//	defer x.Close()
//	if err := rng.Normal(g, s, x, 0, 1); err != nil { // x.normal_(0, 1, generator=g)
//		return err
//	}
//	state := g.State() // 16 bytes, in torch's format
//
// The numbers equal PyTorch 2.11's numbers on the same GPU model. The model matters because
// the assignment of numbers to elements depends on the number of multiprocessors and of
// threads on each multiprocessor. Virtual devices have the multiprocessors of an H200. Their
// uniform numbers, integers and states are equal. Numbers computed with a logarithm, an exponential or a sine
// differ by about the error of the GPU's fast functions, so a few counts of Poisson and samples
// of Multinomial differ, too.
//
// Multinomial differs from torch in two cases that torch does not specify. One is the order of
// equal quotients of weight and random number, which are frequent with 16-bit weights. The other
// is the rounding of the prefix sums, if a single distribution is sampled with replacement.
//
// A fill draws from the given generator or, if it is nil, from the default generator of
// the stream's device. It enqueues the work that overwrites the slice and returns without
// waiting. Arguments that torch rejects are an error; the generator and the slice are then
// unchanged. An empty slice does not advance the generator. Parameters are rounded to the
// element type or, if that is narrower, to float32, as in torch.
//
// A parameter in device memory does not share memory with the filled slice. Poisson and Bernoulli
// also accept a parameter that is the filled slice itself: the same elements, of types of the
// same size (x.bernoulli_(p=x)). All other shared memory is an error. Parameters may share memory
// with each other.
//
// A fill that is captured into a CUDA graph draws nothing during capture. Each launch of
// the graph draws the numbers of all its fills from the current state of the generator,
// including the seed, as in torch. So launches and other fills draw the same numbers as
// the same fills without a graph.
//
// Changes of a generator by the captured function on its goroutine are part of the graph,
// too. After SetState with a state that the function saved, fills repeat the numbers of
// the same launch, for example for activation checkpointing with dropout
// (torch.Generator.graphsafe_set_state). After ManualSeed, or SetState with another state,
// each launch draws the same numbers. Other goroutines change a generator immediately.
//
// The first fill with a distribution and an element type loads its kernel, which takes
// some tenths of a second on CUDA if it must be compiled. The kernel stays loaded. The driver may
// wait for all work of the device when it loads a kernel. If a collective waits for a rank that is
// not enqueued yet, such a fill hangs, so fill a short slice before.
//
// Concurrency: generators are safe for concurrent use. A fill reserves its part of the
// sequence when it is called. Concurrent fills therefore never share numbers, and fills
// in a fixed order draw the same numbers every time, on any streams.
//
// Lifetime: a generator is ordinary Go memory and is not closed.
package rng
