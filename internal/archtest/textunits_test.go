package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A textUnit is a paragraph of a comment or a document, a cell of a table, or a string.
type textUnit struct {
	file string // from the root of the repository
	line int
	text string
}

// textUnits returns the texts of all Go files except tests, and of all documents.
func textUnits(t *testing.T) (units []textUnit) {
	t.Helper()
	eachFile(t, ".md", func(file, path string) error {
		text, err := os.ReadFile(path)
		units = append(units, documentUnits(file, string(text))...)
		return err
	})
	eachGoFile(t, func(file, path string) error {
		list, err := goUnits(file, path)
		units = append(units, list...)
		return err
	})
	return units
}

// eachGoFile calls fn for each Go file that is not a test.
func eachGoFile(t *testing.T, fn func(file, path string) error) {
	t.Helper()
	eachFile(t, ".go", func(file, path string) error {
		if strings.HasSuffix(file, "_test.go") {
			return nil
		}
		return fn(file, path)
	})
}

// eachFile calls fn for each file of the repository with an extension, with its name from the
// root and its path.
func eachFile(t *testing.T, extension string, fn func(file, path string) error) {
	t.Helper()
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		name := e.Name()
		if err == nil && e.IsDir() && (name == "testdata" || name == "bin" || name[0] == '.' && strings.Trim(name, ".") != "") {
			return filepath.SkipDir
		}
		if err != nil || e.IsDir() || filepath.Ext(name) != extension {
			return err
		}
		file, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return fn(file, path)
	})
	require.NoError(t, err)
}

// goUnits returns the paragraphs of comments and the strings of a Go file.
func goUnits(file, path string) (units []textUnit, err error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, g := range f.Comments {
		for _, p := range paragraphs(commentLines(g)) {
			units = append(units, textUnit{file, set.Position(g.Pos()).Line + p.line, p.text})
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			if n.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(n.Value)
			if err == nil && isProse(text) {
				for _, p := range paragraphs(splitColumns(text)) {
					units = append(units, textUnit{file, set.Position(n.Pos()).Line + p.line, p.text})
				}
			}
		}
		return true
	})
	return units, nil
}

// splitColumns returns the lines of a text. Indented lines, such as rows of a table in a help
// text, are separate paragraphs.
func splitColumns(text string) (lines []string) {
	for _, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(l, "  ") || strings.Contains(l, "     ") {
			l = " - " + l
		}
		lines = append(lines, l)
	}
	return lines
}

// isProse reports whether a string is text for people: it has several words and no code.
func isProse(s string) bool {
	return len(strings.Fields(s)) >= 4 && !strings.Contains(s, ";\n") && !strings.Contains(s, "{\n") && !strings.HasPrefix(s, "<")
}

// commentLines returns the lines of a comment without its marks. Directives are empty lines.
func commentLines(g *ast.CommentGroup) (lines []string) {
	for _, c := range g.List {
		text := strings.TrimSuffix(strings.TrimPrefix(c.Text, "/*"), "*/")
		for _, l := range strings.Split(text, "\n") {
			l, marked := strings.CutPrefix(l, "//")
			if marked && l != "" && l[0] != ' ' && l[0] != '\t' {
				l = "" // a directive
			}
			lines = append(lines, l)
		}
	}
	return lines
}

type paragraph struct {
	line int // index of its first line
	text string
}

// paragraphs joins lines of text. It leaves out indented code.
func paragraphs(lines []string) (list []paragraph) {
	var p paragraph
	end := func() {
		if p.text != "" {
			list = append(list, p)
		}
		p = paragraph{}
	}
	for i, l := range lines {
		item := strings.HasPrefix(strings.TrimSpace(l), "- ")
		code := strings.HasPrefix(l, "\t") || strings.HasPrefix(l, "    ") || strings.HasPrefix(l, "  ") && !item && p.text == ""
		if l = strings.TrimSpace(l); l == "" || code && !item {
			end()
			continue
		}
		if item {
			end()
		}
		if p.text == "" {
			p.line = i
		}
		p.text += " " + strings.TrimPrefix(l, "- ")
	}
	end()
	return list
}

var linkTarget = regexp.MustCompile(`\]\([^)]*\)`)

// documentUnits returns the paragraphs and the cells of tables of a document.
func documentUnits(file, text string) (units []textUnit) {
	var block []string
	begin := 0
	end := func(next int) {
		for _, p := range paragraphs(block) {
			units = append(units, textUnit{file, begin + p.line + 1, p.text})
		}
		block, begin = nil, next
	}
	fence := false
	for i, l := range strings.Split(text, "\n") {
		l = linkTarget.ReplaceAllString(l, "]")
		switch {
		case strings.HasPrefix(l, "```"):
			fence = !fence
			end(i + 1)
		case fence:
		case strings.HasPrefix(l, "|"):
			end(i + 1)
			for _, cell := range strings.Split(strings.Trim(l, "|"), " | ") {
				units = append(units, textUnit{file, i + 1, cell})
			}
		case strings.HasPrefix(l, "#"):
			end(i + 1)
		default:
			if len(block) == 0 {
				begin = i
			}
			block = append(block, l)
		}
	}
	end(0)
	return units
}

var (
	sentenceEnd  = regexp.MustCompile(`[.!?]["')*]*\s+`)
	abbreviation = regexp.MustCompile(`(?:\b(?:e\.g|i\.e|vs|cf|etc|approx)|\s\.\.)\.\s$`)
)

// sentences splits a paragraph.
func sentences(text string) (list []string) {
	text = strings.Join(strings.Fields(text), " ") + " "
	from := 0
	for _, at := range sentenceEnd.FindAllStringIndex(text, -1) {
		s := text[from:at[1]]
		if abbreviation.MatchString(s) {
			continue
		}
		list, from = append(list, strings.TrimSpace(s)), at[1]
	}
	if rest := strings.TrimSpace(text[from:]); rest != "" {
		list = append(list, rest)
	}
	return list
}

// TestCommentsBeginWithNames checks that the comment of an exported function, method or type
// begins with its name, as on pkg.go.dev.
func TestCommentsBeginWithNames(t *testing.T) {
	needSource(t)
	count := 0
	eachGoFile(t, func(file, path string) error {
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		check := func(name *ast.Ident, doc *ast.CommentGroup) {
			if !name.IsExported() || doc == nil || strings.TrimSpace(doc.Text()) == "" {
				return
			}
			count++
			if !regexp.MustCompile(`^(?:(?:A|An|The) )?` + name.Name + `\b`).MatchString(doc.Text()) {
				t.Errorf("%s:%d: the comment of %s does not begin with its name", file, set.Position(name.Pos()).Line, name.Name)
			}
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				check(d.Name, d.Doc)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if s, ok := s.(*ast.TypeSpec); ok {
						doc := s.Doc
						if doc == nil && len(d.Specs) == 1 {
							doc = d.Doc
						}
						check(s.Name, doc)
					}
				}
			}
		}
		return nil
	})
	require.Greater(t, count, 1000, "the comments were not found")
}
