package main

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/gds/safetensors"
)

const torchFixtures = "../../internal/torchfile/testdata/"

// checkpointCommand runs a command that must succeed.
func checkpointCommand(t *testing.T, args ...string) string {
	t.Helper()
	out, errs, code := chorusCommand(t, nil, append([]string{"checkpoint"}, args...)...)
	require.Zero(t, code, "%v: %s%s", args, out, errs)
	require.NotContains(t, errs, "\r", "a progress bar is for terminals")
	return out
}

// TestCheckpointCommands takes a file of torch.save through all commands.
func TestCheckpointCommands(t *testing.T) {
	folder := t.TempDir()
	from, step, one := torchFixtures+"nested.pt", filepath.Join(folder, "step-00000012"), filepath.Join(folder, "out", "one.safetensors")
	out := checkpointCommand(t, "ls", from)
	require.Regexp(t, `(?m)^F32 +\[70,33\] +9\.24 kB +model\.layer\.weight$`, out)
	require.Contains(t, out, "4 tensors, 18.8 kB\n")
	require.Contains(t, checkpointCommand(t, "reshard", from, step, "--files", "3"), "step 12, 4 tensors, 18.8 kB in 3 files\n")
	require.Contains(t, checkpointCommand(t, "reshard", step, filepath.Join(folder, "other"), "--files", "1"), "other: step 12, 4 tensors", "the name has no step")
	require.Regexp(t, `(?m)^ +12 +18\.8 kB +3 +1 +4  complete$`, checkpointCommand(t, "ls", folder))
	require.Contains(t, checkpointCommand(t, "ls", folder), "\nbytes not checked: chorus checkpoint verify compares them with the digests\n")
	require.NoError(t, os.Symlink(step, filepath.Join(folder, "step-00000099")))
	require.NotContains(t, checkpointCommand(t, "ls", folder), "99", "a symbolic link")
	require.Contains(t, checkpointCommand(t, "verify", folder), "18.8 kB, all digests match")
	require.Contains(t, checkpointCommand(t, "diff", from, step), "4 tensors, no difference")
	require.NoError(t, os.Mkdir(filepath.Dir(one), 0o755))
	checkpointCommand(t, "export", step, one)
	require.Contains(t, checkpointCommand(t, "diff", one, from), "no difference")
	require.Contains(t, checkpointCommand(t, "verify", one), "checked: the headers, and that the files have the bytes of all tensors; not checked: the elements, because the files have no digests\n")
	whole, err := os.ReadFile(one)
	require.NoError(t, err)
	cut := filepath.Join(folder, "out", "cut.safetensors")
	require.NoError(t, os.WriteFile(cut, whole[:len(whole)-1], 0o644))
	report, _, code := chorusCommand(t, nil, "checkpoint", "verify", cut)
	require.Equal(t, 1, code)
	require.Contains(t, report, "cut.safetensors: damaged: ")
	checkpointCommand(t, "export", step, filepath.Join(folder, "out", "model.safetensors"), "--max-file-size", "10KB")
	require.Contains(t, checkpointCommand(t, "diff", filepath.Join(folder, "out", "model.safetensors.index.json"), from), "no difference")
	require.Contains(t, checkpointCommand(t, "reshard", step, step, "--max-file-size", "1GiB"), "in 1 files")
	require.Contains(t, checkpointCommand(t, "ls", torchFixtures+"distributed"), "columns")
	var r checkpointReport
	require.NoError(t, json.Unmarshal([]byte(checkpointCommand(t, "ls", folder, "--step", "12", "--json")), &r))
	require.Len(t, r.Tensors, 4)
	require.Equal(t, "0.001", r.Metadata["optimizer.param_groups.0.lr"])
	var steps []stepReport
	require.NoError(t, json.Unmarshal([]byte(checkpointCommand(t, "ls", folder, "--json")), &steps))
	require.Equal(t, []stepReport{{Folder: step, Step: 12, Bytes: 18764, Files: 1, Ranks: 1, Tensors: 4, Complete: true}}, steps)
}

// TestDamagedCheckpoints: a changed byte, a truncated file and a missing file.
func TestDamagedCheckpoints(t *testing.T) {
	folder := t.TempDir()
	step := filepath.Join(folder, "step-00000003")
	checkpointCommand(t, "reshard", torchFixtures+"nested.pt", step, "--files", "1")
	file := filepath.Join(step, "model.safetensors")
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	data[len(data)-1] ^= 4
	require.NoError(t, os.WriteFile(file, data, 0o644))
	out, _, code := chorusCommand(t, nil, "checkpoint", "verify", folder)
	require.Equal(t, 1, code)
	require.Regexp(t, `step-00000003: damaged: checkpoint: verify .*/model\.safetensors: tensor "optimizer\.state\.0\.step" at byte \d+: SHA-256 of 4 bytes is`, out)
	out, _, code = chorusCommand(t, nil, "checkpoint", "verify", folder, "--json")
	require.Equal(t, 1, code)
	var reports []verifyReport
	require.NoError(t, json.Unmarshal([]byte(out), &reports))
	require.Len(t, reports[0].Errors, 1)
	out, _, code = chorusCommand(t, nil, "checkpoint", "diff", torchFixtures+"nested.pt", step)
	require.Equal(t, 1, code)
	require.Regexp(t, `^tensor "optimizer\.state\.0\.step": 1 elements differ, the first at \[\], by at most [\d.e+-]+\n1 tensors differ\n$`, out)
	out, _, code = chorusCommand(t, nil, "checkpoint", "diff", torchFixtures+"nested.pt", step, "--json")
	require.Equal(t, 1, code)
	var list []diffReport
	require.NoError(t, json.Unmarshal([]byte(out), &list))
	require.Equal(t, "elements", list[0].Kind)
	_, errs, code := chorusCommand(t, nil, "checkpoint", "reshard", step, filepath.Join(folder, "x"), "--files", "1")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "the file was damaged")
	require.NoError(t, os.WriteFile(file, data[:len(data)-1], 0o644))
	require.Contains(t, checkpointCommand(t, "ls", folder), "not complete: ")
	require.NoError(t, os.Remove(filepath.Join(step, "manifest.json")))
	out, _, code = chorusCommand(t, nil, "checkpoint", "verify", folder)
	require.Equal(t, 1, code)
	require.Contains(t, out, "manifest.json: ")
}

// TestVerifyCheckpointOfTorch: a changed byte of an element is an error that names the file and the
// entry.
func TestVerifyCheckpointOfTorch(t *testing.T) {
	folder := t.TempDir()
	for from, says := range map[string]string{"nested.pt": `torch\.save file: entry "[^"]*/data/\d+": CRC-32 of \d+ bytes is [0-9a-f]{8}, and [0-9a-f]{8} when`, "distributed": `entry "archive/data/0": CRC-32 of`} {
		path := filepath.Join(folder, from)
		if from == "distributed" {
			require.NoError(t, os.CopyFS(path, os.DirFS(torchFixtures+from)))
		} else {
			data, err := os.ReadFile(torchFixtures + from)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, data, 0o644))
		}
		require.Regexp(t, `, checked: the headers, that the files have the bytes of all tensors, and the CRC-32 of \d+ entries\n$`, checkpointCommand(t, "verify", path))
		c, err := checkpoint.Open([]string{path}, nil)
		require.NoError(t, err)
		file := c.Infos()[0].File
		require.NoError(t, c.Close())
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		at := bytes.Index(data, []byte("/data/0")) // in the header of the entry
		require.Positive(t, at)
		data[(at+127)/64*64+3] ^= 1 // torch aligns the elements to 64 bytes
		require.NoError(t, os.WriteFile(file, data, 0o644))
		out, _, code := chorusCommand(t, nil, "checkpoint", "verify", path)
		require.Equal(t, 1, code)
		require.Regexp(t, "damaged: verify "+regexp.QuoteMeta(file)+`: at byte \d+: .*`+says, out)
	}
}

// TestCheckpointNames: names from a file do not control the terminal.
func TestCheckpointNames(t *testing.T) {
	folder := t.TempDir()
	write := func(file string, data byte) string {
		path := filepath.Join(folder, file)
		f, err := os.Create(path)
		require.NoError(t, err)
		require.NoError(t, safetensors.Write(f, nil, safetensors.Data{Tensor: safetensors.Tensor{Name: "a\x1b[2J\nb\u202e", DType: safetensors.U8, Shape: []int{1}}, Raw: []byte{data}}))
		require.NoError(t, f.Close())
		return path
	}
	a, b := write("a\x1b[1m.safetensors", 1), write("b.safetensors", 2)
	out := checkpointCommand(t, "ls", a)
	require.Contains(t, out, `a\x1b[2J\x0ab\u202e`)
	for _, args := range [][]string{{"ls", a, "--json"}, {"verify", a}, {"diff", a, b}, {"diff", a, b, "--json"}, {"reshard", a, filepath.Join(folder, "x\x1b"), "--files", "1"},
		{"export", a, filepath.Join(folder, "y\x1b.safetensors")}, {"ls", a + "\x1b"}} {
		out, errs, _ := chorusCommand(t, nil, append([]string{"checkpoint"}, args...)...)
		require.NotContains(t, out+errs, "\x1b", "%v", args)
		require.NotContains(t, out+errs, "\u202e", "%v", args)
		require.NotEmpty(t, out+errs)
	}
}

// TestStepNumber also reads the temporary name of a checkpoint whose replacement was interrupted.
func TestStepNumber(t *testing.T) {
	for _, folder := range []string{"run-1/step-00000107", "run-1/.saving-step-00000107-replaced"} {
		require.EqualValues(t, 107, stepNumber(folder), folder)
	}
}

func TestCheckpointMistakes(t *testing.T) {
	folder := t.TempDir()
	cut := filepath.Join(folder, "cut.pt")
	data, err := os.ReadFile(torchFixtures + "nested.pt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(cut, data[:len(data)-100], 0o644))
	run := filepath.Join(folder, "run")
	require.NoError(t, os.MkdirAll(filepath.Join(run, "step-00000006"), 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(run, "step-00000007"), 0o755))
	for _, tc := range []struct {
		code int
		says string
		args []string
	}{
		{64, `unknown command "rm"`, []string{"rm"}},
		{64, "0 arguments: want one path", []string{"ls"}},
		{64, "--step -2: want 0 or more", []string{"ls", "x", "--step", "-2"}},
		{64, "0 arguments: want one path or more", []string{"verify"}},
		{64, "1 arguments: want two checkpoints", []string{"diff", "x"}},
		{64, "3 arguments: want a checkpoint and the output", []string{"reshard", "x", "y", "z"}},
		{64, "want --files of 1 or more, or --max-file-size", []string{"reshard", "x", "y"}},
		{64, "want --files of 1 or more, or --max-file-size", []string{"reshard", "x", "y", "--files", "2", "--max-file-size", "1GB"}},
		{64, "--files -1", []string{"reshard", "x", "y", "--files", "-1"}},
		{64, `--max-file-size "5xB": want a size such as`, []string{"export", "x", "y.safetensors", "--max-file-size", "5xB"}},
		{64, `--max-file-size "0": want a size such as`, []string{"export", "x", "y.safetensors", "--max-file-size", "0"}},
		{64, `output "y": want a name that ends in .safetensors`, []string{"export", "x", "y"}},
		{1, "no such file", []string{"ls", "/no/such/file"}},
		{1, "there is no step 5", []string{"ls", folder, "--step", "5"}},
		{1, "checkpoint: open: folder " + run + " has 2 steps of a training: name one of them, such as " + filepath.Join(run, "step-00000007"), []string{"export", run, filepath.Join(folder, "y.safetensors")}},
		{1, "has 2 steps of a training: name one of them", []string{"reshard", run, filepath.Join(folder, "y"), "--files", "1"}},
		{1, "cut.pt: torch.save file: it has no directory at its end: the file is truncated", []string{"ls", cut}},
		{1, "cut.pt", []string{"diff", cut, torchFixtures + "lone.pt"}},
		{1, "99 files: want at most 1", []string{"reshard", torchFixtures + "lone.pt", filepath.Join(folder, "x"), "--files", "99"}},
	} {
		out, errs, code := chorusCommand(t, nil, append([]string{"checkpoint"}, tc.args...)...)
		require.Equal(t, tc.code, code, "%v: %s", tc.args, errs)
		require.Contains(t, errs, tc.says)
		require.Equal(t, 1, strings.Count(errs, "\n"), "one sentence: %s", errs)
		require.Empty(t, out)
	}
}

// TestVerifyOtherFiles: what is no checkpoint is not called damaged, and what may be one is not called anything else.
func TestVerifyOtherFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.Mkdir(empty, 0o700))
	var archive strings.Builder
	z := zip.NewWriter(&archive)
	entry, err := z.CreateHeader(&zip.FileHeader{Name: "folder/other.txt", Method: zip.Store})
	require.NoError(t, err)
	_, err = entry.Write([]byte("text"))
	require.NoError(t, errors.Join(err, z.Close()))
	foreign, after := "not a checkpoint", "\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."
	for path, want := range map[string]string{
		pipe: foreign, "/dev/zero": foreign, empty: foreign,
		write("pickle.pt", after):                                        foreign,
		write("archive.pt", archive.String()):                            foreign,
		write("text", "a text that is long enough"):                      "damaged, or not a checkpoint",
		write("text.safetensors", "a text that is long enough"):          "damaged",
		write("length.safetensors", "\x80\x04\x00\x00\x00\x00\x00\x00{"): "damaged",
	} {
		out, _, code := chorusCommand(t, nil, "checkpoint", "verify", path)
		require.Equal(t, 1, code, out)
		require.True(t, strings.HasPrefix(out, path+": "+want+": "), "%s: %s", path, out)
		require.Equal(t, 1, strings.Count(out, "\n"), out)
		out, _, code = chorusCommand(t, nil, "checkpoint", "verify", "--json", path)
		require.Equal(t, 1, code, out)
		var reports []verifyReport
		require.NoError(t, json.Unmarshal([]byte(out), &reports))
		require.Equal(t, want, reports[0].Verdict)
	}
	require.Equal(t, "not verified", verdict("x.pt", &os.PathError{Op: "open", Path: "x.pt", Err: syscall.EACCES}))
}
