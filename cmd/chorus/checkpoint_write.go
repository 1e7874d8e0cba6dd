package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/plain"
)

const reshardLong = `Write a checkpoint to another number of files.

The output is a folder like a step of a training: safetensors files of whole tensors, an index
for Hugging Face's readers, and a manifest with digests. A training can resume from it. The
step, the number of ranks and their values stay the same. The digests of a step of a training
are verified first.

The output appears complete or not at all. If it is a step of a training already, perhaps the
input itself, it is replaced.`

// writeFlags are the flags of commands that write checkpoints.
type writeFlags struct {
	files int
	size  string
	quiet bool
}

func (f *writeFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.size, "max-file-size", "", "largest size of a file, such as 5GB; larger tensors get a file for themselves")
	c.Flags().BoolVarP(&f.quiet, "quiet", "q", false, "no progress bar")
}

// bytes returns the value of --max-file-size, or 0.
func (f *writeFlags) bytes() (int64, error) {
	if f.size == "" {
		return 0, nil
	}
	n, err := sizeOf(f.size)
	if err != nil {
		return 0, fmt.Errorf("--max-file-size %w", err)
	}
	return n, nil
}

func newReshardCommand() *cobra.Command {
	var f writeFlags
	c := &cobra.Command{
		Use:     "reshard [flags] checkpoint output",
		Short:   "Write a checkpoint to another number of files",
		Long:    reshardLong,
		Example: "  chorus checkpoint reshard runs/7/step-00001000 runs/8/step-00001000 --files 4\n  chorus checkpoint reshard model.pt converted --max-file-size 5GB",
		Args:    paths(2, 2, "a checkpoint and the output"),
		RunE: func(c *cobra.Command, args []string) error {
			n, err := f.bytes()
			if err == nil && (f.files < 0 || c.Flags().Changed("files") == (n > 0) || c.Flags().Changed("files") && f.files == 0) {
				err = fmt.Errorf("--files %d: want --files of 1 or more, or --max-file-size", f.files)
			}
			if err != nil {
				return usageError(c, err)
			}
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return f.reshard(ctx, out, args[0], args[1], n) })
		},
	}
	c.Flags().SortFlags = false
	c.Flags().IntVar(&f.files, "files", 0, "number of files")
	f.add(c)
	return c
}

func (f *writeFlags) reshard(ctx context.Context, out io.Writer, from, to string, most int64) error {
	bar := newBar(os.Stderr, !f.quiet)
	err := checkpoint.Reshard(ctx, from, to, &checkpoint.ReshardConfig{Files: f.files, MaxFileBytes: most, Progress: bar.show})
	bar.end()
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("reshard: interrupted; nothing was written")
	case err != nil:
		return err
	}
	s, err := checkpoint.OpenSaved(to)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: step %d, %d tensors, %s in %d files\n", plain.Text(to), s.Step(), len(s.Tensors()), gigabytes(s.Bytes()), s.Files())
	return errors.Join(err, s.Close())
}

const exportLong = `Write a checkpoint as one safetensors file, or as several with an index.

safetensors.torch.load_file reads the file. With --max-file-size the files are named
NAME-00001-of-0000N.safetensors, and NAME.safetensors.index.json is their index, as
transformers writes them. Plain values of a file of torch.save become metadata. Files appear
complete or not at all. The output replaces an older file of that name.`

func newExportCommand() *cobra.Command {
	var f writeFlags
	c := &cobra.Command{
		Use:     "export [flags] checkpoint output.safetensors",
		Short:   "Write a checkpoint as safetensors files",
		Long:    exportLong,
		Example: "  chorus checkpoint export runs/7/step-00001000 model.safetensors\n  chorus checkpoint export pytorch_model.bin hf/model.safetensors --max-file-size 5GB",
		Args:    paths(2, 2, "a checkpoint and the output"),
		RunE: func(c *cobra.Command, args []string) error {
			n, err := f.bytes()
			if err == nil && !strings.HasSuffix(args[1], ".safetensors") {
				err = fmt.Errorf("output %q: want a name that ends in .safetensors", args[1])
			}
			if err != nil {
				return usageError(c, err)
			}
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return f.export(ctx, out, args[0], args[1], n) })
		},
	}
	c.Flags().SortFlags = false
	f.add(c)
	return c
}

func (f *writeFlags) export(ctx context.Context, out io.Writer, from, to string, most int64) error {
	c, err := checkpoint.Open([]string{from}, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	bar := newBar(os.Stderr, !f.quiet)
	err = c.Export(ctx, to, &checkpoint.SaveConfig{MaxFileBytes: most, Progress: bar.show})
	bar.end()
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("export: interrupted; the output is as before")
	case err != nil:
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d tensors, %s\n", plain.Text(to), len(c.Infos()), gigabytes(c.Bytes()))
	return err
}
