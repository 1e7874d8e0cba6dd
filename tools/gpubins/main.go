// Command gpubins packs everything to run on a GPU machine without Go: the test
// binaries of all packages with their testdata, the examples, and the chorus command.
// It writes the pack, and run.sh, which unpacks and runs it, to a directory.
//
//	gpubins [-o folder] [package patterns, ./... by default]
package main

import (
	"archive/tar"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

//go:embed run.sh
var runScript []byte

const packName = "chorus-gpu"

func main() {
	out := flag.String("o", ".gpu", "output directory")
	flag.Parse()
	patterns := flag.Args()
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	if err := run(*out, patterns); err != nil {
		fmt.Fprintln(os.Stderr, "gpubins:", err)
		os.Exit(1)
	}
}

type pkg struct {
	ImportPath, Name, Dir     string
	TestGoFiles, XTestGoFiles []string
	Module                    struct{ Path string }
}

func (p pkg) rel() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, p.Module.Path), "/")
}

func run(out string, patterns []string) error {
	pkgs, err := list(patterns)
	if err != nil {
		return err
	}
	stage, err := os.MkdirTemp("", packName)
	if err != nil {
		return err
	}
	defer os.RemoveAll(stage)
	if err := build(pkgs, stage); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	for _, dir := range []string{stage, out} {
		if err := os.WriteFile(filepath.Join(dir, "run.sh"), runScript, 0o755); err != nil {
			return err
		}
	}
	file := filepath.Join(out, packName+".tar.xz")
	if err := pack(stage, file); err != nil {
		return err
	}
	st, err := os.Stat(file)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %.1f MB; run %s there\n", file, float64(st.Size())/1e6, filepath.Join(out, "run.sh"))
	return nil
}

func list(patterns []string) ([]pkg, error) {
	out, err := command("go", append([]string{"list", "-json=ImportPath,Name,Dir,TestGoFiles,XTestGoFiles,Module"}, patterns...)...).Output()
	if err != nil {
		return nil, err
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
}

// build fills the stage: tests/<package>/test with its testdata, and
// bin/<command>.
func build(pkgs []pkg, stage string) error {
	var jobs []func() error
	for _, p := range pkgs {
		if p.Name == "main" {
			bin := filepath.Join(stage, "bin", path.Base(p.ImportPath))
			jobs = append(jobs, func() error { return goBuild(p, "build", "-o", bin) })
		}
		if len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			continue
		}
		dir := filepath.Join(stage, "tests", p.rel())
		jobs = append(jobs, func() error {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			data := filepath.Join(p.Dir, "testdata")
			if _, err := os.Stat(data); err == nil {
				if err := os.CopyFS(filepath.Join(dir, "testdata"), os.DirFS(data)); err != nil {
					return err
				}
			}
			return goBuild(p, "test", "-c", "-o", filepath.Join(dir, "test"))
		})
	}
	return parallel(jobs)
}

func goBuild(p pkg, args ...string) error {
	args = append(args, "-trimpath", "-ldflags=-s -w", p.ImportPath)
	if err := command("go", args...).Run(); err != nil {
		return fmt.Errorf("%s: go %s: %w", p.ImportPath, args[0], err)
	}
	return nil
}

func parallel(jobs []func() error) error {
	errs := make([]error, len(jobs))
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i, job := range jobs {
		wg.Go(func() {
			slots <- struct{}{}
			errs[i] = job()
			<-slots
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = os.Environ()
	if os.Getenv("CGO_ENABLED") == "" { // with 1, go-nvml is tested, too, and the GPU machine needs a compatible C library
		cmd.Env = append(cmd.Env, "CGO_ENABLED=0")
	}
	cmd.Stderr = os.Stderr
	return cmd
}

// pack writes the stage to a tar file compressed with xz. The binaries share most
// of their code, so a large window matters more than effort: 150 MB become 17 MB,
// or 63 MB with gzip.
func pack(stage, file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	xz := command("xz", "--lzma2=preset=1,dict=64MiB", "-c")
	xz.Stdout = f
	in, err := xz.StdinPipe()
	if err != nil {
		return err
	}
	if err := xz.Start(); err != nil {
		return err
	}
	err = archive(stage, in)
	if err := errors.Join(err, in.Close(), xz.Wait()); err != nil {
		return err
	}
	return f.Close()
}

func archive(stage string, w io.Writer) error {
	tw := tar.NewWriter(w)
	err := fs.WalkDir(os.DirFS(stage), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm()
		if err := tw.WriteHeader(&tar.Header{Name: path.Join(packName, name), Mode: int64(mode), Size: info.Size(), ModTime: info.ModTime()}); err != nil {
			return err
		}
		f, err := os.Open(filepath.Join(stage, name))
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(tw, f)
		return err
	})
	return errors.Join(err, tw.Close())
}
