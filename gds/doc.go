// Package gds moves bytes between files and device memory.
//
//	f, err := gds.Open("weights.bin", nil)
//	if err != nil {
//		return err
//	}
//	defer f.Close()
//	n, err := f.ReadAt(ctx, s, w.AsBytes(), 4096) // w is a memory.Slice of any type
//
// Package checkpoint loads and saves safetensors checkpoints.
//
// A File is read and written at offsets, like an os.File, but from and to device memory.
// Open reads a file, OpenFile also writes one in place, and Create writes a new file. The
// new file replaces the old one only after Commit has flushed its data to the disk.
//
// Calls are ordered by the stream that they name: they use device memory after the
// operations that are already enqueued on the stream, and operations that are enqueued
// later come after the call. Calls return when the bytes have arrived, or after an error
// when no transfer is pending.
//
// An Engine is the path of the bytes: through the page cache (Cached), around it (Direct),
// or by NVIDIA's cuFile (CuFile). Each file uses an engine that works for it; Status
// reports which one and why. The engines Cached and Direct read with several threads into
// a bounded set of pinned slots; the device copies from one slot while the next one is
// read. Threads, slots and streams are shared by all files and devices.
//
//	torch.cuda.gds                       here
//	GdsFile(filename, flags)             OpenFile
//	GdsFile.register_handle              File.Register
//	GdsFile.deregister_handle            File.Deregister
//	GdsFile.load_storage, save_storage   File.Load, File.Save
//	gds_register_buffer                  RegisterBuffer
//	gds_deregister_buffer                DeregisterBuffer
//
// Concurrency: all functions and methods may be called by several goroutines. Calls on one
// file that write the same bytes are not ordered.
package gds
