package archtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// TestGuides follows the guides as a reader would. A guide is one session in a terminal:
// its files are written, its commands are executed, and their outputs are compared.
//
// Blocks of a guide, by the words after the fence:
//
//	go main.go       a file that the reader saves
//	python model.py  the same; its syntax is checked if Python is installed
//	sh               commands; each of them must succeed
//	text             the whole output of the commands before it. … matches any part of a line,
//	                 and a line with only … matches any number of lines.
//
// The commands also run on a host without GPUs and without a network: the command go in PATH
// takes the module chorus from this checkout, and free ports replace port 29477.
func TestGuides(t *testing.T) {
	d := newDesktop(t)
	files, err := filepath.Glob("../../docs/guides/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			require.NoError(t, d.follow(t, string(text)))
		})
	}
	t.Run("line of a program", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, d.follow(t, sends))
	})
	t.Run("wrong guides", func(t *testing.T) {
		t.Parallel()
		d.testWrongGuides(t)
	})
}

// sends is the guide of a program that the compiler inlines closures of package comm into. In a flight recorder, only the program's
// functions have names outside of Chorus.
const sends = "```go main.go\n" + `package main

import (
	"context"
	"log"

	"github.com/gochorus/chorus/comm"
)

func main() {
	if err := train(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func train(ctx context.Context) error {
	g, err := comm.Init(ctx, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	xs, err := comm.MakeFrom(g, make([]float32, 8))
	if err != nil {
		return err
	}
	defer xs.Close()
	if g.Rank() == 1 {
		if err := comm.Send(g, 0, xs[0]); err != nil {
			return err
		}
	}
	if err := g.Wait(ctx); err != nil {
		return err
	}
	return g.Shutdown(ctx)
}
` + "```\n```sh\n" + `export CHORUS_BACKEND=virtual CHORUS_NCCL_TIMEOUT=3s
export CHORUS_NCCL_TRACE_FILE=$PWD/rank- CHORUS_NCCL_TRACE_FRAMES=yes
go mod init sends
go mod tidy
go build -o train .
chorus run --nproc-per-node 2 --grace 1s -- ./train >log 2>&1 || true
grep -o '"name":"main[^"]*"' rank-1 | sort -u
` + "```\n```text\n…\n\"name\":\"main.main\"\n\"name\":\"main.train\"\n```\n"

// testWrongGuides checks that the test finds mistakes of guides.
func (d *desktop) testWrongGuides(t *testing.T) {
	const program = "```go main.go\npackage main\n\nfunc main() { println(\"3\") }\n```\n```sh\ngo mod init first\ngo build -o first .\n./first\n```\n"
	require.NoError(t, d.follow(t, program+"```text\n…\n3\n```\n"))
	require.NoError(t, d.follow(t, "```sh\nchorus version\n```\n```text\n…chorus…\n…\n```\n`chorus perf -b 8` [links](kernels.md)"))
	require.NoError(t, d.follow(t, "```sh\necho b\necho chorus: a\n```\n```text\nchorus: a\nb\n```\n"), "the launcher and the ranks write beside each other")
	for want, guide := range map[string]string{
		"and not":              "```sh\necho b\n```\n```text\nchorus: a\nb\n```\n",
		"undefined: printn":    strings.Replace(program, "println", "printn", 1),
		"output":               program + "```text\n…\n4\n```\n",
		"the command failed":   "```sh\nfalse\ntrue\n```\n",
		"not found":            "```sh\nchorsu version\n```\n",
		"only prints its help": "```sh\nchorus help mem\n```\n",
		"--procs":              "Use `chorus run --procs 4`.",
		"no command":           "Use `chorus halt`.",
		"does not exist":       "See [this](missing.md).",
		"without its reason":   "```sh\necho '--- FAIL: TestMean'\n```\n```text\n--- FAIL: TestMean\n…\n```\n",
		"language":             "```bash\ntrue\n```\n",
		"name of a file":       "```go\npackage main\n```\n",
	} {
		require.ErrorContains(t, d.follow(t, guide), want, guide)
	}
}

// A block is a fenced block of a guide.
type block struct {
	language, file, text string
}

var fences = regexp.MustCompile("(?ms)^```([a-z]*) ?([^\n]*)\n(.*?)^```")

// follow does what a guide says, in an empty folder.
func (d *desktop) follow(t *testing.T, guide string) error {
	var all []block
	for _, m := range fences.FindAllStringSubmatch(guide, -1) {
		all = append(all, block{m[1], m[2], m[3]})
	}
	if err := d.checkProse(fences.ReplaceAllString(guide, "")); err != nil {
		return err
	}
	script, err := session(all)
	if err != nil {
		return err
	}
	port := strconv.Itoa(testhost.Reserve(t))
	out, err := d.shell(t, strings.ReplaceAll(script, "29477", port))
	outs := strings.Split(strings.ReplaceAll(out, port, "29477"), mark)
	if err != nil {
		return fmt.Errorf("the command failed: %w:\n%s", err, out)
	}
	return compare(all, outs)
}

// mark separates the outputs of the sh blocks.
const mark = "=-= end of block =-=\n"

// session returns the commands of a guide and the commands that save its files.
func session(all []block) (string, error) {
	var b strings.Builder
	for _, k := range all {
		switch k.language {
		case "go", "python":
			if k.file == "" {
				return "", fmt.Errorf("this block has no name of a file:\n%s", k.text)
			}
			fmt.Fprintf(&b, "cat >%s <<'END-OF-FILE'\n%sEND-OF-FILE\n", k.file, k.text)
			if k.language == "python" {
				fmt.Fprintf(&b, "if command -v python3 >/dev/null; then python3 -m py_compile %s; fi\n", k.file)
			}
		case "sh":
			fmt.Fprintf(&b, "%s\nprintf %%s '%s'\n", k.text, mark)
		case "text":
		default:
			return "", fmt.Errorf("the test does not know the language %q:\n%s", k.language, k.text)
		}
	}
	return b.String(), nil
}

// compare compares the outputs of the sh blocks with the text blocks after them.
func compare(all []block, outs []string) error {
	n := -1
	for i, k := range all {
		if k.language == "sh" {
			n++
			if strings.Contains(outs[n], "Available Commands:") {
				return fmt.Errorf("a command only prints its help:\n%s", k.text)
			}
		}
		if k.language != "text" {
			continue
		}
		if i == 0 || all[i-1].language != "sh" {
			return fmt.Errorf("no commands before the output\n%s", k.text)
		}
		if m := failures.FindString(k.text); m != "" {
			return fmt.Errorf("the text shows a failed test without its reason, so that any failure would match:\n%s", m)
		}
		if !pattern(k.text, false).MatchString(linesOf(outs[n], false)) || !pattern(k.text, true).MatchString(linesOf(outs[n], true)) {
			return fmt.Errorf("the output of\n%sis\n%sand not\n%s", all[i-1].text, outs[n], k.text)
		}
	}
	return nil
}

// failures matches a failed test whose next line has no text.
var failures = regexp.MustCompile(`(?m)^--- FAIL.*\n(?:…*\n|--- |\z)`)

// linesOf returns the lines of an output that chorus run writes, or the others: its lines and those of the programs have no common order.
func linesOf(text string, launcher bool) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line == "…\n" || strings.HasPrefix(line, "chorus: ") == launcher {
			b.WriteString(line)
		}
	}
	return b.String()
}

// pattern returns the expression that matches the lines of an output.
func pattern(text string, launcher bool) *regexp.Regexp {
	var b strings.Builder
	for line := range strings.Lines(linesOf(text, launcher)) {
		if line == "…\n" {
			b.WriteString(`(?:.*\n)*?`)
			continue
		}
		line = regexp.QuoteMeta(strings.TrimRight(line, " \n"))
		b.WriteString(strings.ReplaceAll(line, "…", ".*") + ` *\n`)
	}
	return regexp.MustCompile(`^` + b.String() + `$`)
}

var (
	links    = regexp.MustCompile(`\]\(([^):#]+)`)
	spans    = regexp.MustCompile("`[^`]+`")
	commands = regexp.MustCompile("`(chorus [^`]+)`")
)

// checkProse checks that linked files exist, and that chorus has the commands and the flags
// that the text names.
func (d *desktop) checkProse(text string) error {
	for _, m := range links.FindAllStringSubmatch(spans.ReplaceAllString(text, ""), -1) {
		if _, err := os.Stat(filepath.Join("../../docs/guides", m[1])); err != nil {
			return fmt.Errorf("the link to %s does not exist", m[1])
		}
	}
	for _, m := range commands.FindAllStringSubmatch(text, -1) {
		own, _, _ := strings.Cut(m[1], " -- ")
		args := append(strings.Fields(own)[1:], "--help")
		out, err := exec.Command(d.chorus, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", m[1], err, out)
		}
		if !strings.Contains(string(out), "\n  chorus "+args[0]) {
			return fmt.Errorf("%s: chorus has no command %s", m[1], args[0])
		}
	}
	return nil
}

// A desktop is the reader's computer.
type desktop struct {
	chorus string
	env    []string
}

// newDesktop builds the command chorus, or skips the test without the sources.
func newDesktop(t *testing.T) *desktop {
	t.Helper()
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("the go command is not installed")
	}
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Skip("this is not a checkout")
	}
	bin := t.TempDir()
	d := &desktop{chorus: filepath.Join(bin, "chorus")}
	require.NoError(t, os.WriteFile(filepath.Join(bin, "go"), fmt.Appendf(nil, wrapper, root, goTool), 0o700))
	out, err := exec.Command(goTool, "env", "GOCACHE", "GOMODCACHE").Output()
	require.NoError(t, err)
	caches := strings.Fields(string(out))
	ours := regexp.MustCompile(`^(CHORUS_|NCCL_|PET_|SLURM_|CUDA_VISIBLE_DEVICES=|(RANK|WORLD_SIZE|LOCAL_RANK|HOME|PATH)=)`)
	d.env = append(slices.DeleteFunc(os.Environ(), ours.MatchString),
		"GOCACHE="+caches[0], "GOMODCACHE="+caches[1], "GOFLAGS=-mod=mod -ldflags=-w -vet=off", "GOPROXY=off", "GOWORK=off", "CGO_ENABLED=0",
		"CHORUS_JOIN_TIMEOUT=60s", "PATH="+bin+":"+os.Getenv("PATH"))
	build := exec.Command(goTool, "build", "-ldflags=-s -w", "-o", d.chorus, "./cmd/chorus")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	out, err = build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return d
}

// wrapper is the command go of the reader: the module chorus is the checkout.
const wrapper = `#!/bin/sh
case "$*" in
"install github.com/gochorus/chorus/cmd/chorus@latest")
	exit ;;
"mod tidy")
	ls ./*.go >/dev/null && cp %[1]q/go.sum . && exec %[2]q mod edit -require=github.com/gochorus/chorus@v0.0.0 -replace=github.com/gochorus/chorus=%[1]q ;;
esac
exec %[2]q "$@"
`

// shell executes a script in an empty folder, and returns all output.
func (d *desktop) shell(t *testing.T, script string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute) // it compiles on a busy machine
	defer cancel()
	dir := t.TempDir()
	cmd := exec.CommandContext(ctx, "bash", "-e", "-o", "pipefail", "-c", script)
	cmd.Dir, cmd.Env, cmd.WaitDelay = dir, slices.Concat(d.env, []string{"HOME=" + dir}), time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}
