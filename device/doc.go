// Package device finds GPUs, manages their primary contexts and defines their errors.
//
//	devs, err := device.All() // the GPUs that CUDA_VISIBLE_DEVICES leaves
//	if err != nil {
//		return err // says which libraries were tried, or that there is no GPU
//	}
//	for _, d := range devs {
//		p, err := d.Properties()
//		...
//	}
//
// CHORUS_BACKEND selects the devices, once per process: cuda, virtual, or auto (the
// default), which means CUDA or an error. Virtual devices are a strict software
// implementation of the driver in host memory; NewSystem makes further sets of devices, for
// tests.
//
// Lifetime: a device is not closed; it lives as long as its System.
//
// Concurrency: everything here may be called by any goroutine at any time. A CUDA context
// is bound to an OS thread, but Chorus binds it within each call, so a program never has
// to lock a goroutine to a thread for CUDA, and never sets a current device.
package device
