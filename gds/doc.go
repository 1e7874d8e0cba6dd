// Package gds moves bytes between files and device memory, and safetensors checkpoints
// between files and the devices of a group.
//
//	ckpt, err := gds.OpenSafetensors("model.safetensors.index.json")
//	if err != nil {
//		return err
//	}
//	defer ckpt.Close()
//	ws, err := ckpt.Load(ctx, g, &gds.LoadConfig{Plan: func(t gds.Info) gds.Placement {
//		if strings.HasSuffix(t.Name, "norm.weight") {
//			return gds.Replicate()
//		}
//		return gds.Shard(0) // and Own, Slice, Skip
//	}})
//	w, err := gds.Get[memory.BFloat16](ws[0], "lm_head.weight")
//
// Each byte is read from the files once, by one rank; what others need of it goes from
// device to device. Save writes what the ranks have together, SaveTensors what one
// device has, and Verify compares digests. Below that are files:
//
//	f, err := gds.Open("weights.bin", nil)
//	if err != nil {
//		return err
//	}
//	defer f.Close()
//	n, err := f.ReadAt(ctx, s, w.AsBytes(), 4096) // w is a memory.Slice of any type
//
// A File is read and written at offsets, like an os.File, but from and to device
// memory. Open reads a file, OpenFile also writes one in place, and Create writes
// a new one, which takes the old one's place only when Commit has put all of it on
// the disk.
//
// Calls are ordered by the stream that they name: device memory is used after
// what is on the stream by then, and what is enqueued later comes after the call.
// They return when the bytes have arrived, or when nothing is in flight any more.
//
// An Engine is the way of the bytes: by the page cache (Cached), past it
// (Direct), or by NVIDIA's cuFile (CuFile). Each file gets one that works for it,
// and Status says which and why. The native engines read with several threads into
// a bounded ring of pinned memory, from which the device copies while the next
// bytes are read; threads, ring and streams are shared by all files and devices.
//
//	torch.cuda.gds                       here
//	GdsFile(filename, flags)             OpenFile
//	GdsFile.register_handle              File.Register
//	GdsFile.deregister_handle            File.Deregister
//	GdsFile.load_storage, save_storage   File.Load, File.Save
//	gds_register_buffer                  RegisterBuffer
//	gds_deregister_buffer                DeregisterBuffer
//
// Concurrency: everything may be called by several goroutines. Calls on one file
// that write the same bytes are not ordered.
package gds
