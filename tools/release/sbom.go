package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"
)

// A bom is a list of components in CycloneDX 1.6.
type bom struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Serial     string      `json:"serialNumber"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
	Depends    []depends   `json:"dependencies"`
}

type metadata struct {
	Time      string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type depends struct {
	Ref string   `json:"ref"`
	On  []string `json:"dependsOn"`
}

// writeSBOM lists the modules that a binary was built from, by the binary's build information.
func writeSBOM(to, binary, version string, when time.Time) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(newBOM(info, sha256.Sum256(data), version, when), "", "  ")
	if err != nil {
		return err
	}
	f, err := create(to)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

func newBOM(info *debug.BuildInfo, sum [32]byte, version string, when time.Time) *bom {
	main := component{Type: "application", Ref: purl(info.Main.Path, version), Name: "chorus", Version: version, PURL: purl(info.Main.Path, version),
		Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}}, Properties: []property{{"go:version", info.GoVersion}}}
	for _, s := range info.Settings {
		main.Properties = append(main.Properties, property{"go:" + s.Key, s.Value})
	}
	b := &bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Serial: serial(sum), Components: []component{}}
	b.Metadata = metadata{when.Format(time.RFC3339), main}
	d := depends{Ref: main.Ref, On: []string{}}
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	std := component{Type: "library", Ref: purl("std", goVersion), Name: "std", Version: goVersion, PURL: purl("std", goVersion)}
	b.Components, d.On = append(b.Components, std), append(d.On, std.Ref)
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := component{Type: "library", Ref: purl(m.Path, m.Version), Name: m.Path, Version: m.Version, PURL: purl(m.Path, m.Version)}
		if m.Sum != "" {
			c.Properties = []property{{"go:sum", m.Sum}} // of the module's files, as in go.sum
		}
		b.Components, d.On = append(b.Components, c), append(d.On, c.Ref)
	}
	b.Depends = []depends{d}
	return b
}

// purl returns the package URL of a module.
func purl(path, version string) string {
	return "pkg:golang/" + strings.ToLower(path) + "@" + strings.ReplaceAll(version, "+", "%2B")
}

// serial returns a UUID that the binary decides.
func serial(sum [32]byte) string {
	u := sum
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80 // version 8: of the application's choice
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:16])
}
