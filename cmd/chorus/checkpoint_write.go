package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/torchfile"
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
	_, err = fmt.Fprintf(out, "%s: step %d, %d tensors, %s in %d files\n", safe.Text(to), s.Step(), len(s.Tensors()), gigabytes(s.Bytes()), s.Files())
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
	_, err = fmt.Fprintf(out, "%s: %d tensors, %s\n", safe.Text(to), len(c.Infos()), gigabytes(c.Bytes()))
	return err
}

// errDifferent is the error of a comparison that found a difference and has printed it.
var errDifferent = exitCode(launch.ExitFailed)

const verifyLong = `Compare the bytes of checkpoints with the digests that were computed when they were saved.

A path is a step of a training, or a folder with steps, which are all verified. The error
names the file, the tensor and its offset in the file, for each damaged tensor.

For files that are not steps of a training the command checks that their headers are valid and that
the files have the bytes of all tensors. Files of torch.save and of torch.distributed.checkpoint
have a CRC-32 of each entry, which the command compares with the bytes; the error names the file
and the entry. Safetensors files have no digests. The command does not check their elements, and
says so. A path that is no checkpoint at all is not called damaged.`

func newVerifyCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "verify [flags] path...",
		Short:   "Compare the bytes of checkpoints with their digests",
		Long:    verifyLong,
		Example: "  chorus checkpoint verify runs/7\n  chorus checkpoint verify runs/7/step-00001000 --json",
		Args:    paths(1, 1<<20, "one path or more"),
		RunE: func(c *cobra.Command, args []string) error {
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return verify(ctx, out, args, asJSON) })
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "results in JSON")
	return c
}

// A verifyReport is the result for one checkpoint.
type verifyReport struct {
	Path   string   `json:"path"`
	Bytes  int64    `json:"bytes"`
	Digest bool     `json:"digests"`         // of a step of a training
	CRC32  int      `json:"crc32,omitempty"` // number of entries of files of torch whose CRC-32 was compared
	Errors []string `json:"errors,omitempty"`

	// Verdict says what the errors mean: "damaged", "not a checkpoint", "not verified" because the files cannot be opened, or
	// "damaged, or not a checkpoint". It is empty if there are none.
	Verdict string `json:"verdict,omitempty"`

	unchecked int // files or entries whose elements were not checked
}

func verify(ctx context.Context, out io.Writer, args []string, asJSON bool) error {
	reports, failed := []verifyReport{}, false
	for _, path := range args {
		folders, err := stepsOf(path)
		if err != nil {
			return err
		}
		if len(folders) == 0 {
			folders = []string{path}
		}
		for _, folder := range folders {
			r := verifyOne(ctx, folder)
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			failed = failed || len(r.Errors) > 0
			if reports = append(reports, r); asJSON {
				continue
			}
			if err := r.write(out); err != nil {
				return err
			}
		}
	}
	if asJSON {
		if err := encode(out, reports); err != nil {
			return err
		}
	}
	if failed {
		return errDifferent
	}
	return nil
}

// hasManifest reports whether a path is a step of a training.
func hasManifest(path string) bool {
	_, err := os.Lstat(filepath.Join(path, "manifest.json"))
	return err == nil || strings.HasPrefix(filepath.Base(path), "step-")
}

func verifyOne(ctx context.Context, path string) verifyReport {
	r := verifyReport{Path: path, Digest: hasManifest(path)}
	var err error
	if r.Digest {
		var s *checkpoint.Saved
		if s, err = checkpoint.OpenSaved(path); err == nil {
			r.Bytes = s.Bytes()
			err = errors.Join(s.Verify(ctx), s.Close())
		}
	} else {
		var c *checkpoint.Checkpoint
		if c, err = checkpoint.Open([]string{path}, nil); err == nil {
			r.Bytes = c.Bytes()
			var sums torchfile.Sums
			sums, r.unchecked, err = checkSums(ctx, path, c)
			r.CRC32, r.unchecked = sums.Checked, r.unchecked+sums.Without
			err = errors.Join(err, c.Close())
		}
	}
	if err != nil {
		r.Errors, r.Verdict = strings.Split(err.Error(), "\n"), verdict(path, err)
	}
	return r
}

// verdict says what an error of verify proves. A file whose header is not valid may be one of another program, unless its name says that it
// is a checkpoint.
func verdict(path string, err error) string {
	opens := []error{fs.ErrPermission, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM}
	_, format := errors.AsType[*safetensors.FormatError](err)
	named := slices.Contains([]string{".safetensors", ".json", ".pt", ".pth", ".bin"}, filepath.Ext(path))
	info, statErr := os.Stat(path)
	switch {
	case errors.Is(err, torchfile.ErrForeign):
		return torchfile.ErrForeign.Error()
	case slices.ContainsFunc(opens, func(e error) bool { return errors.Is(err, e) }):
		return "not verified"
	case format && !named && statErr == nil && info.Mode().IsRegular():
		return "damaged, or not a checkpoint"
	}
	return "damaged"
}

func (r *verifyReport) write(out io.Writer) error {
	text := fmt.Sprintf("%s: %s, all digests match\n", safe.Text(r.Path), gigabytes(r.Bytes))
	switch {
	case len(r.Errors) > 0:
		text = ""
		for _, e := range r.Errors {
			text += fmt.Sprintf("%s: %s: %s\n", safe.Text(r.Path), r.Verdict, safe.Text(e))
		}
	case r.CRC32 > 0:
		text = fmt.Sprintf("%s: %s, checked: the headers, that the files have the bytes of all tensors, and the CRC-32 of %d entries\n", safe.Text(r.Path), gigabytes(r.Bytes), r.CRC32)
		if r.unchecked > 0 {
			text = fmt.Sprintf("%s; not checked: %d files or entries without a CRC-32\n", strings.TrimSuffix(text, "\n"), r.unchecked)
		}
	case !r.Digest:
		text = fmt.Sprintf("%s: %s, checked: the headers, and that the files have the bytes of all tensors; not checked: the elements, because the files have no digests\n", safe.Text(r.Path), gigabytes(r.Bytes))
	}
	_, err := io.WriteString(out, text)
	return err
}
