package archtest

import (
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// known are the variables that fragments use without declaring them.
const known = `var (
	ctx     context.Context
	err     error
	sys     *device.System
	dev     *device.Device
	devs    []*device.Device
	s       *stream.Stream
	streams []*stream.Stream
	g       *comm.Group
	sh      *ddp.Sharder[float32]
	w, x, y, z, src, dst, state memory.Slice[float32]
	xs      comm.Shards[float32]
	a, b, c tensor.Tensor
	in, out []float32
	id      []byte
	i, n, rank, size, steps, next, previous int
	step    func() error
	update  func(s *stream.Stream, param, grad, state memory.Slice[float32]) error
)`

// instead replaces lines of known where a document uses the same name for something else.
var instead = map[string]string{
	"internal/dl/library.go": "var fn, bytes, stream uintptr",
	"amp/doc.go": `var (
	err error
	s   *stream.Stream
	opt *optim.Optimizer
)`,
	"optim/doc.go": `var (
	s                                       *stream.Stream
	weights, weightGrads, bias, biasGrads memory.Slice[float32]
)`,
	"checkpoint/publish.go": `var (
	ctx        context.Context
	s          *stream.Stream
	g          *comm.Group
	addr, name string
	parts      [][]checkpoint.Part
	wanted     []checkpoint.Part
	step       int64
)`,
	"ddp/doc.go": `var (
	ctx   context.Context
	err   error
	dev   *device.Device
	s     *stream.Stream
	g     *comm.Group
	grads [][]memory.Slice[float32]
	i     int
)`,
	"ddp/gradient.go": `var (
	err   error
	s     *stream.Stream
	g     *comm.Group
	grads *optim.Grads
	opt   *optim.Optimizer
)`,
	"ddp/units.go": `var (
	err error
	s   *stream.Stream
	u   *ddp.Units[float32, memory.BFloat16Bits]
	k   int
	opt *optim.Optimizer
)`,
	"ddp/uneven.go": `var (
	ctx    context.Context
	err    error
	s      *stream.Stream
	g      *comm.Group
	r      *ddp.Reducer
	params memory.Slice[float32]
)`,
	"nccl/batch.go": `var (
	err            error
	c              *nccl.Communicator
	comms          []*nccl.Communicator
	s              *stream.Stream
	streams        []*stream.Stream
	x, y           memory.Slice[float32]
	xs             []memory.Slice[float32]
	next, previous int
)`,
	"nccl/callconfig.go": `var (
	c        *nccl.Communicator
	s        *stream.Stream
	dst, src memory.Slice[float32]
)`,
}

// A snippet is code in a document.
type snippet struct{ place, text string }

// All Go code in comments and in documents compiles.
func TestCodeInDocumentsCompiles(t *testing.T) {
	c := newChecker(t)
	testWrongCodeIsFound(t, c)
	all := append(inComments(t, "../.."), inMarkdown(t, "../..")...)
	compiled := 0
	for _, s := range all {
		if !looksLikeGo(s.text) {
			continue
		}
		compiled++
		for _, err := range c.complaints(s.place, program(c, s)) {
			t.Errorf("%s: %v\n%s", s.place, err, s.text)
		}
	}
	require.Greater(t, compiled, 20, "there were more when this test was written")
}

// testWrongCodeIsFound checks that the test notices code that does not compile.
func testWrongCodeIsFound(t *testing.T, c *checker) {
	for _, text := range []string{"x, err := stream.New(dev)", "v := undeclared", "x := memory.Maker(s)", "x := 1 +", "var x int = in"} {
		require.NotEmpty(t, c.complaints("wrong", program(c, snippet{"wrong", text})), text)
	}
	require.Empty(t, c.complaints("right", program(c, snippet{"right", "own, err := stream.New(dev, nil)\n..."})))
	for text, want := range map[string]bool{"x := f()": true, "err = f()": true, "\tdefer f()": true, "make test": false, "int f(int x);": false, "a == b": false} {
		require.Equal(t, want, looksLikeGo(text), text)
	}
}

var goSigns = regexp.MustCompile(`(?m):=|^\s*\w+(, \w+)* = |^\s*(defer|package|import|func) `)

func looksLikeGo(text string) bool { return goSigns.MatchString(text) }

var (
	elision    = regexp.MustCompile(`(?m)^(\s*)\.\.\.`)
	qualifiers = regexp.MustCompile(`\b([a-z]\w*)\.[A-Z]`)
)

// program returns the file of a snippet, which is a file, declarations, or statements.
func program(c *checker, s snippet) string {
	body := elision.ReplaceAllString(s.text, "$1")
	if strings.HasPrefix(strings.TrimSpace(body), "package ") {
		return body
	}
	if _, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+body, 0); err != nil {
		body = "func _() error {\n" + body + "\nreturn nil\n}"
	}
	vars := known
	if own, ok := instead[s.place]; ok {
		vars = own
	}
	return "package user\n" + c.imports(vars+body) + vars + "\n" + body
}

// imports are the packages whose names qualify something in the code.
func (c *checker) imports(code string) string {
	var names []string
	for _, m := range qualifiers.FindAllStringSubmatch(code, -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range slices.Compact(names) {
		for _, path := range []string{name, module + "/" + name, module + "/internal/" + name} {
			if _, ok := c.sources[path]; ok {
				fmt.Fprintf(&b, "import %q\n", path)
				break
			}
		}
	}
	return b.String()
}

// inComments returns the code blocks of the comments of all declarations.
func inComments(t *testing.T, root string) (all []snippet) {
	fset := token.NewFileSet()
	walk(t, root, ".go", func(path, name string) {
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		require.NoError(t, err)
		var p comment.Parser
		ast.Inspect(f, func(n ast.Node) bool {
			g, ok := n.(*ast.CommentGroup)
			if !ok {
				return true
			}
			for _, b := range p.Parse(g.Text()).Content {
				if code, ok := b.(*comment.Code); ok {
					all = append(all, snippet{name, code.Text})
				}
			}
			return true
		})
	})
	return all
}

var fence = regexp.MustCompile("(?ms)^```([a-z]*)[^\n]*\n(.*?)^```")

// inMarkdown returns the Go blocks of the documents. The guides have a test that runs them.
func inMarkdown(t *testing.T, root string) (all []snippet) {
	walk(t, root, ".md", func(path, name string) {
		if strings.HasPrefix(name, "docs/guides/") {
			return
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range fence.FindAllStringSubmatch(string(text), -1) {
			if m[1] == "go" {
				all = append(all, snippet{name, m[2]})
			}
		}
	})
	return all
}

// walk calls fn for the files of a kind, with their names from the root.
func walk(t *testing.T, root, ext string, fn func(path, name string)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && d.Name() != ".." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		if filepath.Ext(path) == ext {
			name, err := filepath.Rel(root, path)
			require.NoError(t, err)
			fn(path, filepath.ToSlash(name))
		}
		return nil
	}))
}
