// Which session of a family began as which version of another.

/**
 * Grows trees from sessions and their versions, newest first. A fork's oldest version has the number and the last block of the
 * version that it began as, and was made later. Where that version is no longer kept, or the fork's own first one is not, the fork
 * stands beside the oldest session of the family (`strays`).
 */
export function tree(family) {
  const nodes = family.map(({ session, versions }) => ({
    session,
    strays: [],
    versions: versions.map((version) => ({ version, forks: [] })),
    began: versions.at(-1)?.at ?? Infinity,
  })).sort((a, b) => a.began - b.began);
  const roots = [];
  for (const [index, node] of nodes.entries()) {
    const first = node.versions.at(-1)?.version;
    const origin = first && nodes.slice(0, index).flatMap((other) => other.versions).find(({ version }) =>
      version.version === first.version && version.prefix_id === first.prefix_id && version.at <= first.at);
    if (origin) origin.forks.push(node);
    else if (roots.length) roots[0].strays.push(node);
    else roots.push(node);
  }
  return roots;
}
