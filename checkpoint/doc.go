// Package checkpoint loads checkpoints to the devices of a group, and saves them as
// safetensors files.
//
//	ckpt, err := checkpoint.Open([]string{"model.safetensors.index.json"}, nil)
//	if err != nil {
//		return err
//	}
//	defer ckpt.Close()
//	ws, err := ckpt.Load(ctx, g, &checkpoint.LoadConfig{Plan: func(t checkpoint.Info) checkpoint.Placement {
//		if strings.HasSuffix(t.Name, "norm.weight") {
//			return checkpoint.Replicate()
//		}
//		return checkpoint.Shard(0) // and Own, Slice, Skip
//	}})
//	w, err := checkpoint.Get[memory.BFloat16Bits](ws[0], "lm_head.weight")
//
// A [Plan] says which part of each tensor a rank gets. [Checkpoint.Load] reads each byte of
// the files once, by one rank. Bytes that other ranks need go from device to device over
// the group. [Save] writes the tensors that the ranks have together, [SaveTensors] writes
// tensors of one device, and [Checkpoint.Verify] compares digests of loaded tensors with
// the files. [Checkpoint.LoadOn] and [SaveOn] do the same for one device without a group.
//
// A [Saver] saves the state of a training, which the ranks have in any layout, while the
// training goes on. [Latest] finds the newest complete checkpoint of a Saver, and
// [Saved.Restore] loads it on any number of ranks. [Latest] and [List] ignore symbolic links to
// checkpoints. Links in a checkpoint's folder that lead out of it are refused, except in folders of
// models, because the caches of models consist of such links.
//
// A [Transfer] moves such parts between the ranks of a group without files. A [Publisher] sends the weights of a training to inference
// engines that come and go, each of which has a [Subscriber].
//
// [Open] also reads files of torch.save and folders of torch.distributed.checkpoint, without
// running code. [Checkpoint.Export], [Reshard] and [Compare] work on the host, without a device.
//
// Load and Save return when all bytes have arrived, or when nothing is in flight any more.
// Package gds reads and writes the files.
//
// Everything may be called by several goroutines. Collective calls of one group are for
// one goroutine, as all collectives are.
package checkpoint
