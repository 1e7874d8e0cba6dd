// Package rng has torch's random numbers: its CUDA generator, and the fills that
// draw from it, bit for bit.
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
//	state := g.State() // 16 bytes, which torch reads and writes
//
// The numbers are those of PyTorch 2.11 on the same model of GPU: which element
// gets which number depends on the number of multiprocessors and of threads on
// each. On virtual devices, which have those of an H200, the uniform ones, the
// integers and the states are the same, and those that pass through a logarithm,
// an exponential or a sine differ by about the error of the GPU's fast ones.
//
// A fill takes its numbers from the generator that it is given, or from the
// default one of the stream's device when that is nil; enqueues on the stream the
// work that overwrites its slice; and returns without waiting. Arguments that
// torch refuses are an error, and then neither the generator nor the slice has
// changed. An empty slice leaves the generator as it is. Parameters are rounded
// to the element type, or to float32 where that is narrower, as in torch.
//
// A fill that is captured into a CUDA graph takes nothing then. Each launch of the
// graph takes the numbers of all of its fills from the generator as it is at that
// time, seed included, so that launches and other fills in turn draw what the
// same fills without a graph would, as in torch. What the captured function does with a
// generator on its goroutine is a part of the graph too: after SetState with a state that
// it has saved, fills draw the same numbers again, in each launch others (activation
// checkpointing with dropout, torch.Generator.graphsafe_set_state); after ManualSeed, or
// SetState with a state from outside, each launch draws the same. Other goroutines set a
// generator at once.
//
// The first fill with a distribution and an element type on a device compiles its
// kernel, some tenths of a second on CUDA, and the kernel stays with the device
// for the life of the process.
//
// Concurrency: generators may be used by several goroutines. A fill takes its
// part of the sequence when it is called, so concurrent fills never share
// numbers, and fills in a fixed order draw the same ones every time, whichever
// streams they are on.
//
// Lifetime: a generator is ordinary Go memory and is not closed.
package rng
