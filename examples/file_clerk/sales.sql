-- A quarter of a small shop's sales; amounts in euros.
CREATE TABLE sales (id INTEGER PRIMARY KEY, region TEXT NOT NULL, amount INTEGER NOT NULL, status TEXT NOT NULL);
INSERT INTO sales (region, amount, status) VALUES
  ('North', 120, 'paid'), ('South', 75, 'paid'), ('East', 210, 'open'), ('North', 45, 'refunded'),
  ('West', 330, 'paid'), ('East', 95, 'paid'), ('South', 140, 'paid'), ('North', 60, 'paid'),
  ('West', 15, 'open'), ('East', 180, 'paid'), ('South', 20, 'refunded'), ('West', 85, 'paid');
